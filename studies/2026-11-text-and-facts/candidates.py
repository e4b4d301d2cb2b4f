"""Policies that may become starting points for text and facts together, by their names."""

from kvsearch.policy_space import Value
from kvsearch.policy_space.methods import METHODS
from kvsearch.policy_space.naming import name_of

Knobs = dict[str, Value]
_HEADS: Knobs = dict(interval=16, budgets="heads", rotate=True, levels="lloyd")
_MEAN: Knobs = dict(_HEADS, rule="mean", sinks=8, group="head")
_LADDER: Knobs = dict(_MEAN, ladder="half-overlap")
_H2O: Knobs = dict(_HEADS, rule="h2o", sinks=4, fp16_sinks=True)
_SHAPES: list[tuple[Knobs, int, str, tuple[float, ...]]] = [  # recent tokens, bits, exponents
    (_MEAN, 64, "k5v4", (0.25, 0.35, 0.5, 0.75, 1.0)),
    (_MEAN, 64, "k4v3", (0.5, 0.75, 1.0)),
    (_MEAN, 128, "k5v4", (0.25, 0.75)),
    (_H2O, 16, "k5v4", (0.75, 1.0)),
    (_H2O, 16, "k4v3", (0.75, 1.0)),
    (_H2O, 64, "k5v4", (0.75, 1.0, 1.5)),
    (_H2O, 64, "k4v3", (1.0,)),
    (_MEAN, 64, "k3v2", (0.5, 0.75, 1.0)),
    (_LADDER, 64, "k3v2", (0.75,)),
    (_H2O, 16, "k3v2", (0.75, 1.0)),
    (_MEAN, 64, "k3v3", (1.0,)),
    (_MEAN, 64, "k4v2", (1.0,)),
    (_LADDER, 64, "k4v3", (0.75, 1.0)),
    (_LADDER, 64, "k5v4", (0.5, 0.75)),
    (_LADDER, 64, "k4v2", (0.75,)),
    (_LADDER, 64, "k3v3", (0.75,)),
]
AS_KEYS_ARE = "mean+k5v4+heads0.5, keys as they are"  # on models whose keys get an offset elsewhere
# which compact once a context has been read
PROMPTED = ("kvzip", "kvzip+k5v4", "kvzip+k5v4+refit", "snapkv-prompt")
PUBLISHED = ("h2o", "tova", "snapkv", "streamingllm")
COMBINED = ("h2o+int4-fine", "xmu+int4", "window+int4")


def candidates() -> dict[str, Knobs]:
    """Name -> knobs, in a fixed order, of which the names depend."""
    found: dict[str, Knobs] = {}
    for base, recent, tiers, exponents in _SHAPES:
        for exponent in exponents:
            knobs = {**base, "recent_window": recent, "tiers": tiers, "exponent": exponent}
            found[name_of(knobs, [*METHODS, *found], len(found))] = knobs
    return found


def policies() -> dict[str, Knobs]:
    """What is measured, published methods and their combinations among them."""
    return candidates() | {n: dict(METHODS[n].knobs) for n in (*PUBLISHED, *COMBINED)}


def others() -> dict[str, Knobs]:
    """What is measured where it is asked for (`--only`): fewer bits, repairs, methods."""
    bare: Knobs = {**candidates()["mean+k5v4+heads0.5"], "offset": "none"}
    window: Knobs = {**METHODS["window+int4"].knobs, "offset": "none"}
    repairs: dict[str, Knobs] = {
        AS_KEYS_ARE: bare,
        f"{AS_KEYS_ARE}, bits by layer": {**bare, "bits": "layer"},
        "window+int4, keys as they are": window,
        "window+int4, keys as they are, along tokens": {**window, "along": "tokens"},
    }
    h2o: Knobs = {**_H2O, "recent_window": 16, "tiers": "k3v3", "exponent": 1.0}
    fewer: dict[str, Knobs] = {
        "h2o+k3v3+heads1": h2o,
        "kvzip+k4v3+refit+bias": {
            **METHODS["kvzip+k5v4+refit+bias"].knobs,
            "tiers": "k4v3",
        },
        "kvzip+k4v3": {**METHODS["kvzip+k5v4"].knobs, "tiers": "k4v3"},
        "kvzip+k3v2": {**METHODS["kvzip+k5v4"].knobs, "tiers": "k3v2"},
        "kvzip+k3v2+refit+bias": {
            **METHODS["kvzip+k5v4+refit+bias"].knobs,
            "tiers": "k3v2",
        },
        "kvzip+k4v3+refit": {**METHODS["kvzip+k5v4+refit"].knobs, "tiers": "k4v3"},
    }
    return fewer | repairs | {n: dict(METHODS[n].knobs) for n in ("keydiff", *PROMPTED)}
