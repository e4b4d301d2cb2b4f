"""Policies that may become portfolio points: what committed searches found, and what was designed.

The searches of `studies/2026-11-outcome` and `studies/2026-11-first-front` had budgets per layer
and at most 4 bits between 4 and 8; the study of the axes says that budgets per KV head and keys in
5 bits are better at the same bytes. So their winners stand here with both.
"""

from kvsearch.policy_space import Value

Knobs = dict[str, Value]

_HEADS: Knobs = {"budgets": "heads", "rotate": True}
_OUTCOME = "studies/2026-11-outcome"
_FOUND: dict[str, tuple[str, Knobs]] = {
    "b128": (f"{_OUTCOME}/b128, trial 54", dict(
        rule="h2o", ladder="half-overlap", tiers="k4v4", interval=8, sinks=0, exponent=0.35,
        recent_window="layers", group=64, fp16_sinks=True)),
    "b192": (f"{_OUTCOME}/b192, trial 58", dict(
        rule="xmu", tiers="k4v4", interval=16, sinks=4, recent_window="half", exponent=0.25,
        group="head")),
    "b256": (f"{_OUTCOME}/b256, trial 67", dict(
        rule="xmu", ladder="half-overlap", tiers="k4v4", interval=32, sinks=4, recent_window=16,
        exponent=0.5, group="head")),
    "b384": (f"{_OUTCOME}/b384, trial 34", dict(
        tiers="k4v4", interval=64, sinks=8, recent_window=192, exponent=0.25, group=64,
        positions="cache")),
    "b384-mean": (f"{_OUTCOME}/b384-two-windows, trial 56", dict(
        rule="mean", ladder="half-overlap", tiers="16-4", interval=64, sinks=0, recent_window=192,
        exponent=0.35, group=64, positions="cache")),
    "b384-half": (f"{_OUTCOME}/b384-two-windows-divergence, trial 44", dict(
        rule="xmu", ladder="half", tiers="k4v4", interval=64, sinks=0, recent_window=64,
        exponent=0.5, group=64)),
    "mean": ("studies/2026-11-first-front, trial 29", dict(
        rule="mean", tiers="k4v4", interval=16, sinks=8, recent_window=128, exponent=0.5,
        group="head")),
}  # fmt: skip
_DESIGNED: Knobs = dict(
    rule="xmu", interval=16, tiers="k5v4", sinks=4, recent_window=64, levels="lloyd",
    fp16_sinks=True, exponent=0.5, **_HEADS,
)  # fmt: skip


def candidates() -> dict[str, tuple[str, Knobs]]:
    """Name -> where it comes from, and its knobs."""
    found = {"designed": ("studies/2026-11-axes, designed with heads and 5-bit keys", _DESIGNED)}
    for name, changed in {
        "designed, 32 recent": {"recent_window": 32},
        "designed, interval 8": {"interval": 8},
        "designed, h2o": {"rule": "h2o"},
        "designed, ladder": {"ladder": "half-overlap", "sinks": 4, "interval": 32},
    }.items():
        found[name] = ("studies/2026-11-axes, designed, one step from it", {**_DESIGNED, **changed})
    for name, (source, knobs) in _FOUND.items():
        bits: Knobs = {"tiers": "k5v4", "levels": "lloyd"} if knobs["tiers"] == "k4v4" else {}
        more = " and 5-bit keys" if bits else ""
        found[name] = (f"{source}, with budgets per KV head{more}", {**knobs, **_HEADS, **bits})
    return found
