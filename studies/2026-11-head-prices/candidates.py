"""Policies that may become portfolio points: what committed searches found, and what was designed.

The searches of `studies/2026-11-outcome` and `studies/2026-11-first-front` had budgets per layer
and at most 4 bits between 4 and 8; the study of the axes says that budgets per KV head and keys in
5 bits are better at the same bytes. So their winners stand here with both, at several exponents of
the head budgets: what heads lose is measured otherwise since (`studies/2026-11-head-prices`).
"""

from kvsearch.policy_space import Value

Knobs = dict[str, Value]

_HEADS: Knobs = dict(budgets="heads", rotate=True, levels="lloyd", tiers="k5v4")
_MEAN: Knobs = dict(rule="mean", interval=16, sinks=8, recent_window=128, group="head", **_HEADS)
_XMU: Knobs = dict(
    rule="xmu", interval=16, sinks=4, recent_window=64, fp16_sinks=True, **_HEADS
)  # fmt: skip
_SMALL: Knobs = {**_XMU, "rule": "h2o", "recent_window": 16}
_FIRST = "studies/2026-11-first-front, trial 29, with budgets per KV head and 5-bit keys"
_OUTCOME = "studies/2026-11-outcome"
_STEP = "studies/2026-11-axes, designed, one step from it"
_ZIP: Knobs = dict(
    rule="kvzip", trigger="prompt", budgets="global", rotate=True, levels="lloyd", group=32
)  # fmt: skip
_BASES: dict[str, tuple[str, Knobs, tuple[float, ...]]] = {
    "mean": (_FIRST, _MEAN, (0.25, 0.35, 0.5)),
    "mean, 64 recent": (_FIRST, {**_MEAN, "recent_window": 64}, (0.25, 0.35, 0.5)),
    "mean, 32 recent": (_FIRST, {**_MEAN, "recent_window": 32}, (0.35,)),
    "mean, 4 bits": (_FIRST, {**_MEAN, "recent_window": 64, "tiers": "k4v4"}, (0.35,)),
    "designed": ("studies/2026-11-axes, designed", _XMU, (0.35, 0.5)),
    "designed, h2o": (_STEP, {**_XMU, "rule": "h2o"}, (0.35, 0.5, 0.75, 1.0, 1.25, 1.5)),
    "designed, h2o, 16 recent": (_STEP, _SMALL, (0.75, 1.0, 1.25)),
    "designed, h2o, 16 recent, k4v3": (_STEP, {**_SMALL, "tiers": "k4v3"}, (0.75, 1.0)),
    "designed, h2o, 16 recent, k3v3": (_STEP, {**_SMALL, "tiers": "k3v3"}, (0.75,)),
    "designed, snapkv": (_STEP, {**_XMU, "rule": "snapkv"}, (0.5, 0.75, 1.0)),
    "designed, mean": (_STEP, {**_XMU, "rule": "mean"}, (0.35, 0.5, 0.75, 1.0)),
    "designed, interval 8": (_STEP, {**_XMU, "rule": "h2o", "interval": 8}, (0.5,)),
    "b192": (f"{_OUTCOME}/b192, trial 58", {
        **_XMU, "recent_window": "half", "group": "head", "fp16_sinks": False}, (0.35,)),
    "b384": (f"{_OUTCOME}/b384, trial 34", dict(
        interval=64, sinks=8, recent_window=192, group=64, positions="cache", **_HEADS), (0.25,)),
}  # fmt: skip


def candidates() -> dict[str, tuple[str, Knobs]]:
    """Name -> where it comes from, and its knobs."""
    return {
        f"{name}, {exponent:g}": (source, {**knobs, "exponent": exponent})
        for name, (source, knobs, exponents) in _BASES.items()
        for exponent in exponents
    }


def rereading() -> dict[str, Knobs]:
    """KVzip's scores and its one threshold, in few bits: for comparison, at twice the prefill."""
    return {f"kvzip, {tiers}": {**_ZIP, "tiers": tiers} for tiers in ("k4v4", "k4v3", "k3v3")}
