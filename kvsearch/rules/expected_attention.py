"""Attention that future queries are expected to give (Devoto et al. 2025, arXiv:2510.00636).

Queries before their rotation are modelled as Gaussian. Their mean and covariance, turned by the
mean rotation of the next positions, give the expected exponential of each key's product with a
query. The rank is this times the norm of the value (kvpress's ExpectedAttentionPress).
"""

from collections.abc import Mapping
from math import log2, log10
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from kvsearch.rules.base import Need, Place, Rule, Scorer, Segment, Slots

if TYPE_CHECKING:
    from torch import Tensor


class ExpectedAttention(Rule):
    """Rank by the attention that a Gaussian query at the next positions would give.

    The public code takes the statistics of one prompt; here they run over the whole stream, and
    their bytes count: `4 Hq D`, and with the covariance `2 Hq D (D + 1)` more, in every layer.

    Attributes:
        future: positions ahead over which the rotation is averaged.
        covariance: use the second moment too, as published; a small cache may weigh less.
        value_norm: multiply by the L2 norm of the value.
        epsilon: added to the probability before that.
        skip: first tokens (the sinks) that are left out: their queries of the statistics, their
            keys of the softmax. They rank as high as the best.
    """

    name: str = "expected-attention"
    future: int = Field(default=512, ge=1, le=1 << 20)
    covariance: bool = True
    value_norm: bool = True
    epsilon: float = Field(default=0.0, ge=0.0)
    skip: int = Field(default=4, ge=0)

    needs: ClassVar[frozenset[Need]] = frozenset({"queries", "keys", "values"})
    paper: ClassVar[str] = "Expected Attention, arXiv:2510.00636"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "expected-attention": {},
        "expected-attention-mean": dict(covariance=False),
    }
    methods: ClassVar[Mapping[str, tuple[Mapping[str, Any], str]]] = {
        "expected-attention": (
            dict(rule="expected-attention", interval=32, sinks=4, recent_window=32),
            "attention expected of future queries, with its covariance (arXiv:2510.00636)",
        ),
        "expected-attention-mean": (
            dict(rule="expected-attention-mean", interval=32, sinks=4, recent_window=32),
            "the same from the mean query alone, which holds far less beside the cache",
        ),
    }
    axes: ClassVar[Mapping[str, str]] = {
        **Rule.axes,
        "future": "looks ahead",
        "covariance": "covariance",
        "value_norm": "value norm",
        "epsilon": "evened",
        "skip": "skipped",
    }
    feature_names: ClassVar[tuple[str, ...]] = ("expected", "covariance", "value norm")

    def layer_bytes(self, heads: int, kv_heads: int, head_dim: int) -> int:
        """Sums of queries and, with the covariance, of their outer products, fp32."""
        pairs = head_dim * (head_dim + 1) // 2 if self.covariance else 0
        return 4 * heads * (head_dim + pairs)

    def canonical(self) -> dict[str, Any]:
        """Without what is added to a probability that no norm multiplies."""
        d = self.model_dump()
        return d if self.value_norm else {**d, "epsilon": 0.0}

    def features(self) -> dict[str, float]:
        """Flags, and sizes on a log scale."""
        return {
            **super().features(),
            "expected": 1.0,
            "covariance": float(self.covariance),
            "value norm": float(self.value_norm),
            "looks ahead": log2(self.future) / 12,
            "evened": self.value_norm * (1 + log10(max(self.epsilon, 1e-6)) / 6),
            "skipped": log2(1 + self.skip) / 4,
        }

    def family(self) -> str:
        """As published."""
        return "Expected-attention"

    def words(self) -> list[str]:
        """How far ahead, and whether the covariance is used."""
        return [f"over the next {self.future} positions"] + (
            [] if self.covariance else ["mean query only"]
        )

    def scorer(self, place: Place) -> "ExpectedAttentionScorer":
        """Running statistics of the queries."""
        return ExpectedAttentionScorer(self, place)


class ExpectedAttentionScorer(Scorer):
    """Statistics of un-rotated queries.

    Attributes:
        total: sum of queries `[B, Hq, D]` fp32.
        outer: sum of outer products, the upper triangle `[B, Hq, D (D + 1) / 2]` fp32, or None.
        count: queries summed.
    """

    def __init__(self, rule: ExpectedAttention, place: Place) -> None:
        import torch

        assert place.inv_freq is not None
        self.rule, self.inv_freq, self.count = rule, place.inv_freq.double(), 0
        self.kv_heads = place.kv_heads
        zeros = torch.zeros(
            place.batch, place.heads, place.head_dim, device=place.device, dtype=torch.float32
        )
        self.total = zeros
        self.outer: Tensor | None = None
        if rule.covariance:
            self.triangle = torch.triu_indices(place.head_dim, place.head_dim, device=place.device)
            self.outer = zeros.new_zeros(*zeros.shape[:2], self.triangle.shape[1])

    def observe(self, segment: Segment) -> None:
        """Add the segment's queries, but the first `skip` of the stream."""
        assert segment.queries is not None
        q = segment.queries[:, :, max(0, self.rule.skip - segment.seen) :].float()
        self.count += q.shape[2]
        self.total = self.total + q.sum(2)
        if self.outer is not None:
            i, j = self.triangle
            self.outer = self.outer + (q.mT @ q)[..., i, j]

    def ranks(self, slots: Slots) -> "Tensor":
        """Expected probabilities, averaged over the query heads of each KV head."""
        import torch

        skip = min(self.rule.skip, slots.count - 1)
        keys, values = (x[:, :, skip:].float() for x in slots.read())
        B, H, _, D = keys.shape
        n = max(1, self.count)
        mean = self.total / n
        turn = self._mean_rotation(slots.position, D)  # [D, D]
        mu = (mean @ turn.mT).view(B, H, -1, D)
        s = mu @ keys.mT / D**0.5  # [B, H, G, N]
        if self.outer is not None:
            i, j = self.triangle
            second = keys.new_zeros(*mean.shape, D)
            second[..., i, j] = second[..., j, i] = self.outer / n
            covariance = second - mean.unsqueeze(-1) * mean.unsqueeze(-2)
            covariance = (turn @ covariance @ turn.mT).view(B, H, -1, D, D)
            k = keys.unsqueeze(2)
            s = s + ((k @ covariance) * k).sum(-1) / D / 2
        p = s.softmax(-1).mean(2)
        if self.rule.value_norm:
            p = (p + self.rule.epsilon) * values.norm(dim=-1)
        best = p.amax(-1, keepdim=True).expand(-1, -1, skip)
        return torch.cat([best, p], -1)

    def _mean_rotation(self, first: int, D: int) -> "Tensor":
        """Mean rotation matrix `[D, D]` of a query over the positions from `first` on."""
        import torch

        half = self.inv_freq.shape[0]
        at = torch.arange(first, first + self.rule.future, device=self.inv_freq.device).double()
        angle = at.unsqueeze(-1) * self.inv_freq
        cos, sin = angle.cos().mean(0), angle.sin().mean(0)
        out = torch.eye(D, dtype=torch.float64, device=self.inv_freq.device)
        i = torch.arange(half, device=self.inv_freq.device)
        out[i, i] = out[i + half, i + half] = cos
        out[i, i + half], out[i + half, i] = -sin, sin
        return out.float()

    @property
    def nbytes(self) -> int:
        """Both sums."""
        outer = 0 if self.outer is None else self.outer.nbytes
        return (self.total.nbytes + outer) // max(1, self.total.shape[0])

    def reorder(self, rows: "Tensor") -> None:
        """Select batch rows (beam search)."""
        self.total = self.total[rows]
        self.outer = None if self.outer is None else self.outer[rows]
