"""Names of points of the space, in the grammar of published combinations: `mean+k5v4+heads0.35`.

A name says what is kept, in how many bits, and how layers or heads share the slots. Where that is
the name of another policy, it says one thing more: `mean+k5v4+heads0.35+recent128`.
"""

from collections.abc import Collection, Iterator, Mapping

from kvsearch.policy_space.axes import KNOBS, Value

Knobs = Mapping[str, Value]
_SAID = (
    "evict", "rule", "ladder", "anchors", "channels", "tiers", "budgets", "exponent", "beta",
    "refit",
)  # fmt: skip
_WORDS = {  # how the other knobs are said, those first that differ most
    "recent_window": "recent{}",
    "budget_fraction": "x{}",
    "interval": "every{}",
    "sinks": "sinks{}",
    "levels": "{}",
    "positions": "positions-{}",
    "group": "group{}",
}


def name_of(knobs: Knobs, taken: Collection[str], number: int) -> str:
    """A name that no other policy has.

    Args:
        knobs: of the policy.
        taken: names of others.
        number: of the policy, for one that nothing else tells from them.
    """
    found = "+".join(_parts(knobs))
    if found not in taken:
        return found
    more = list(_further(knobs))
    for part in more:
        if f"{found}+{part}" not in taken:
            return f"{found}+{part}"
    return f"{'+'.join([found, *more[:1]])}+no{number}"


def _parts(knobs: Knobs) -> Iterator[str]:
    """What is kept, its bits, and how it is shared out."""

    def said(knob: str) -> Value | None:
        value = knobs.get(knob, KNOBS[knob].default)
        return None if value == KNOBS[knob].default else value

    kept = [str(said("rule"))] if said("rule") else []
    kept += [f"ladder-{said('ladder')}"] if said("ladder") else []
    kept += [f"anchors-{said('anchors')}"] if said("anchors") else []
    yield "+".join(kept) or ("window" if said("evict") is None else "full")
    if said("channels"):
        yield f"channels-{said('channels')}"
    if tiers := said("tiers"):
        yield str(tiers)
    if budgets := said("budgets"):
        knob = {"heads": "exponent", "sensitivity": "exponent", "pyramid": "beta"}.get(str(budgets))
        yield f"{budgets}{_value(knobs.get(knob, KNOBS[knob].default)) if knob else ''}"
    if fit := said("refit"):
        yield {"values": "refit", "values+bias": "refit+bias"}[str(fit)]


def _further(knobs: Knobs) -> Iterator[str]:
    """What else is not as by default, a part each."""
    rest = [k for k in knobs if k not in (*_SAID, *_WORDS)]
    for knob in (*_WORDS, *rest):
        if knob in knobs and knobs[knob] != KNOBS[knob].default:
            yield _WORDS.get(knob, f"{knob}={{}}").format(_value(knobs[knob]))


def _value(value: Value | None) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value).lower()
