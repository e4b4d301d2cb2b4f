"""Named points of the axes that are no plain value: rules, ladders and lists of tiers."""

from kvsearch.policy import Ladder, Tier
from kvsearch.rules import Rule, presets

RULES: dict[str, Rule | None] = presets()

LADDERS: dict[str, Ladder | None] = {
    "none": None,
    "quarter": Ladder(span=0.25, overlap=0.5),
    "quarter-contiguous": Ladder(span=0.25, overlap=0.5, order="contiguous"),
    "half": Ladder(span=0.5, overlap=0.0),
    "half-overlap": Ladder(span=0.5, overlap=0.5),
    "custom": Ladder(span=0.5, overlap=0.5),  # refined by the knobs ladder.*
}


def _tiers(*parts: tuple[float, int, int]) -> tuple[Tier, ...]:
    return tuple(Tier.model_validate(dict(share=s, key_bits=k, value_bits=v)) for s, k, v in parts)


TIERS: dict[str, tuple[Tier, ...]] = {
    "16": _tiers((1, 16, 16)),
    "k8v8": _tiers((1, 8, 8)),
    "k8v4": _tiers((1, 8, 4)),
    "k5v5": _tiers((1, 5, 5)),
    "k5v4": _tiers((1, 5, 4)),
    "k4v4": _tiers((1, 4, 4)),
    "k4v3": _tiers((1, 4, 3)),
    "k4v2": _tiers((1, 4, 2)),
    "k3v4": _tiers((1, 3, 4)),
    "k3v3": _tiers((1, 3, 3)),
    "k3v2": _tiers((1, 3, 2)),
    "k2v2": _tiers((1, 2, 2)),
    "k1v1": _tiers((1, 1, 1)),
    "8-4": _tiers((0.3, 8, 8), (0.7, 4, 4)),
    "4-v2": _tiers((0.5, 4, 4), (0.5, 4, 2)),
    "16-4": _tiers((0.1, 16, 16), (0.9, 4, 4)),
    "custom": _tiers((1, 4, 4)),  # refined by the knobs tiers.*
    # XMU's Table 1, by the ratio it prints; its 0.6 adds up to 0.45, 0.6-fixed is what it means
    "xmu-0.1": _tiers((0.2, 4, 4), (0.8, 1, 1)),
    "xmu-0.2": _tiers((0.6, 4, 4), (0.4, 2, 2)),
    "xmu-0.4": _tiers((0.6, 8, 8), (0.4, 4, 4)),
    "xmu-0.6-printed": _tiers((0.8, 8, 8), (0.2, 4, 4)),
    "xmu-0.6-fixed": _tiers((0.2, 16, 16), (0.8, 8, 8)),
    "xmu-0.8": _tiers((0.6, 16, 16), (0.4, 8, 8)),
}
