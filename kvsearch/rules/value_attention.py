"""Attention received times the norm of the value (VATP, arXiv:2406.12335).

A key that receives attention changes the output only as far as its value is large: the values of
sinks are near 0. The paper multiplies H2O's or Scissorhands' score by the L1 norm of the value;
its public code keeps the sinks whatever their product, which is `sinks` of the policy here.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from kvsearch.rules.attention import Attention, AttentionScorer
from kvsearch.rules.base import Need, Place, Slots

if TYPE_CHECKING:
    from torch import Tensor


class ValueAttention(Attention):
    """`attention` with the same fields, times the L1 norm of each slot's value as it is held."""

    name: str = "value-attention"

    needs: ClassVar[frozenset[Need]] = frozenset({"attention", "values"})
    paper: ClassVar[str] = "VATP, arXiv:2406.12335"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "value-attention": {},
        "value-attention-forget": dict(horizon=512, kind="decay"),
        "value-attention-xmu": dict(alpha=1, beta=1),
    }
    methods: ClassVar[Mapping[str, tuple[Mapping[str, Any], str]]] = {
        "value-attention": (
            dict(rule="value-attention", interval=16, sinks=4, recent_window="half"),
            "H2O's score times the norm of the value (arXiv:2406.12335)",
        ),
    }
    feature_names: ClassVar[tuple[str, ...]] = (*Attention.feature_names, "value norm")
    fast: ClassVar[frozenset[str]] = frozenset()  # the scan holds no values in order of slots

    def canonical(self) -> dict[str, Any]:
        """As `attention`, under its own name."""
        return {"name": self.name, **super().canonical()}

    def features(self) -> dict[str, float]:
        """As `attention`, and one more."""
        return {**super().features(), "value norm": 1.0}

    def family(self) -> str:
        """Whatever the powers."""
        return "VATP-like"

    def scorer(self, place: Place) -> "ValueAttentionScorer":
        """Running sums per slot."""
        return ValueAttentionScorer(self, place)


class ValueAttentionScorer(AttentionScorer):
    """Sums per slot; the norms are read from the slots at each compaction."""

    def ranks(self, slots: Slots) -> "Tensor":
        """Corrected sums times `||v||_1`, smoothed outside the recent window."""
        norm = slots.read()[1].float().abs().sum(-1)  # [B, H, N]
        sums = self.corrected(slots.seen)
        if sums.shape[1] == 1:
            norm = norm.mean(1, keepdim=True)
        return self.smooth(sums * norm, slots.recent_from)
