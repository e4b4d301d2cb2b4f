"""Attention less redundancy of keys (R-KV, arXiv:2505.24133), for long generated texts.

Reasoning repeats itself: tokens whose keys resemble those of many others say nothing new, however
much attention they receive. Of tokens that resemble each other the last one is not counted against.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from kvsearch.rules.attention import Attention, AttentionScorer
from kvsearch.rules.base import Need, Place, Slots

if TYPE_CHECKING:
    from torch import Tensor

ROWS = 512  # keys that are compared with all at once


class Redundancy(Attention):
    """`attention` with the same fields, as shares, less a softmax of mean cosines between keys.

    Attributes:
        weight: of attention; 1 less it is that of redundancy.
        alike: cosine above which two keys are similar: the last similar one of each is exempt.
    """

    name: str = "redundancy"
    weight: float = Field(default=0.1, ge=0.0, le=1.0)
    alike: float = Field(default=0.5, ge=-1.0, le=1.0)

    needs: ClassVar[frozenset[Need]] = frozenset({"attention", "keys"})
    paper: ClassVar[str] = "R-KV, arXiv:2505.24133"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "redundancy": {},
        "redundancy-rkv": dict(horizon=8, pool=7, pool_kind="max"),
    }
    methods: ClassVar[Mapping[str, tuple[Mapping[str, Any], str]]] = {
        "rkv": (
            dict(rule="redundancy-rkv", interval=32, recent_window=8),
            "attention of the last 8 tokens less redundancy of keys (arXiv:2505.24133)",
        ),
        "rkv-generation": (
            dict(rule="redundancy-rkv", interval=32, recent_window=8, trigger="generation"),
            "rkv as published: the prompt stays, generated tokens are evicted",
        ),
    }
    axes: ClassVar[Mapping[str, str]] = {
        **Attention.axes,
        "weight": "attention weight",
        "alike": "alike from",
    }
    feature_names: ClassVar[tuple[str, ...]] = (*Attention.feature_names, "redundancy")
    fast: ClassVar[frozenset[str]] = frozenset()  # ranks are below 0, and keys are read

    def canonical(self) -> dict[str, Any]:
        """As `attention`, under its own name."""
        return {"name": self.name, **super().canonical()}

    def features(self) -> dict[str, float]:
        """As `attention`, a flag and two numbers."""
        more = {"redundancy": 1.0, "attention weight": self.weight, "alike from": self.alike}
        return {**super().features(), **more}

    def family(self) -> str:
        """Whatever the powers."""
        return "R-KV-like"

    def words(self) -> list[str]:
        """As `attention`, and its weight."""
        return [*super().words(), f"attention weighs {self.weight:.3g}"]

    def scorer(self, place: Place) -> "RedundancyScorer":
        """Running sums per slot."""
        return RedundancyScorer(self, place)


class RedundancyScorer(AttentionScorer):
    """Sums per slot; keys are read at each compaction."""

    def __init__(self, rule: Redundancy, place: Place) -> None:
        super().__init__(rule, place)
        self.weight, self.alike = rule.weight, rule.alike

    def ranks(self, slots: Slots) -> "Tensor":
        """Shares of attention, smoothed outside the recent window, less redundancy, weighed."""
        sums = self.corrected(slots.seen)
        whole = sums.sum(-1, keepdim=True).clamp_min(1e-12)
        score = self.smooth(sums, slots.recent_from) / whole
        redundant = redundancy(slots.read()[0].float(), self.alike)
        if score.shape[1] == 1:
            redundant = redundant.mean(1, keepdim=True)
        return self.weight * score - (1 - self.weight) * redundant


def redundancy(keys: "Tensor", alike: float) -> "Tensor":
    """Softmax over slots of the mean cosine of all other keys with a slot's, `[B, H, N]` fp32.

    A key's cosine with the last one that is more similar than `alike` counts as 0, and that with
    itself too.

    Args:
        keys: `[B, H, N, D]` fp32, in order of time.
        alike: cosine.
    """
    import torch

    unit = keys / keys.norm(dim=-1, keepdim=True).clamp_min(1e-8)
    n = keys.shape[2]
    slot = torch.arange(n, device=keys.device)
    total = torch.zeros(keys.shape[:3], device=keys.device, dtype=torch.float32)
    for first in range(0, n, ROWS):
        rows = slot[first : first + ROWS, None]
        near = unit[:, :, first : first + ROWS] @ unit.transpose(2, 3)
        near = near.masked_fill(rows == slot, 0.0)
        last = torch.where((near > alike) & (rows != slot), slot, -1).amax(-1, keepdim=True)
        total += near.masked_fill(last == slot, 0.0).sum(2)
    return (total / n).softmax(-1)
