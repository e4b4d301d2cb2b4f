"""The most attention of any query instead of the mean over queries (DefensiveKV, arXiv:2510.13334).

A mean over past queries relies on later ones being like them. The maximum over queries and over the
query heads of a group is the largest loss that was seen, and no slot counts less than the mean of
these maxima: a slot that was never attended to may still be asked for.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from kvsearch.rules.base import Need, Place, Segment, Slots
from kvsearch.rules.critical import ABOVE, Critical, CriticalScorer, lifted

if TYPE_CHECKING:
    from torch import Tensor


MOST_BYTES = 4  # fp32


class Defensive(Critical):
    """`critical` by the largest attention of a query, at least the mean of all slots' largest.

    `alpha` and `beta` correct the sums of the first stage alone, which no `pool` smooths.

    Attributes:
        first: share of the attention, sinks and recent window apart, that the slots of the first
            stage received together. They are at most as many as stay.
    """

    name: str = "defensive"
    first: float = Field(default=0.9, ge=0.0, le=1.0)

    needs: ClassVar[frozenset[Need]] = frozenset({"attention", "rows", "values", "outputs"})
    paper: ClassVar[str] = "DefensiveKV, arXiv:2510.13334"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "defensive": {},
        "defensive-snapkv": dict(horizon=32, pool=5),
    }
    methods: ClassVar[Mapping[str, tuple[Mapping[str, Any], str]]] = {
        "defensivekv": (
            dict(rule="defensive-snapkv", interval=32, recent_window=32),
            "the most attention that any of the last 32 queries gave (arXiv:2510.13334)",
        ),
        "defensivekv-prompt": (
            dict(
                rule="defensive-snapkv", interval=32, recent_window=32, budgets="adakv",
                trigger="prompt",
            ),
            "defensivekv as published: once, after the prompt, AdaKV's budgets",
        ),
    }  # fmt: skip
    feature_names: ClassVar[tuple[str, ...]] = (*Critical.feature_names, "most attention")

    def slot_bytes(self, interval: int) -> int:
        """As `critical`, and a maximum for every partial sum."""
        return super().slot_bytes(interval) + MOST_BYTES * self.blocks(interval)

    def features(self) -> dict[str, float]:
        """As `critical`, and a flag."""
        return {**super().features(), "most attention": 1.0}

    def family(self) -> str:
        """Whatever the powers."""
        return "DefensiveKV-like"

    def words(self) -> list[str]:
        """As `attention`, and the first stage."""
        return [*super().words()[:-1], f"{100 * self.first:.3g} % of attention first"]

    def scorer(self, place: Place) -> "DefensiveScorer":
        """Running sums and maxima per slot, and norms."""
        return DefensiveScorer(self, place)


class DefensiveScorer(CriticalScorer):
    """Sums and norms per slot, and the most that any query gave.

    Attributes:
        most: `[R, B, V, N]` fp32, for every partial sum; that of a `decay` fades as the sum does.
    """

    def __init__(self, rule: Defensive, place: Place) -> None:
        import torch

        super().__init__(rule, place)
        self.most = torch.zeros_like(self.sums)

    def watched(self, count: int, left: int) -> int:
        """Those of the window, or all."""
        r = self.rule
        if r.kind == "decay" or r.horizon is None:
            return count
        return max(0, min(count, r.horizon - left))

    def observe(self, segment: Segment) -> None:
        """Add what every slot received, and compare what each query gave with the most so far."""
        import torch

        assert segment.rows is not None
        r, rows = self.rule, segment.rows.float()
        many = rows.shape[3]
        if r.pool > 1 and many:
            near = self.smooth(rows.flatten(0, 3), rows.shape[-1]).view_as(rows)
            rows = near.masked_fill(rows == 0, 0.0)  # of slots that a query does not see
        if r.kind == "decay" and r.horizon is not None:
            back = torch.arange(many - 1, -1, -1, device=rows.device, dtype=torch.float32)
            rows = rows * ((1 - 1 / r.horizon) ** back).unsqueeze(-1)
            self.most *= (1 - 1 / r.horizon) ** segment.count
        new = rows.shape[-1] - self.most.shape[-1]
        self.most = torch.nn.functional.pad(self.most, (0, new))
        if many:
            best = rows.amax((2, 3))
            best = best.amax(1, keepdim=True) if self.most.shape[2] == 1 else best
            self.most[0] = torch.maximum(self.most[0], best)
        super().observe(segment)

    def ranks(self, slots: Slots) -> "Tensor":
        """Maxima, at least their mean outside the recent window, times norms; first stage above."""
        import torch

        most = self.most.amax(0)
        old = most[..., : max(1, slots.recent_from)]
        ranks = torch.maximum(most, old.mean(-1, keepdim=True)) * self._read(slots)
        if slots.stay is None:
            return ranks
        free = self.corrected(slots.seen)[..., slots.sinks : slots.recent_from]
        order = free.sort(dim=-1, stable=True, descending=True)
        before = order.values.cumsum(-1) - order.values
        taken = before < self.first * free.sum(-1, keepdim=True)
        stays = max(0, slots.stay - slots.count + slots.recent_from - slots.sinks)
        taken[..., stays:] = False
        return lifted(ranks, order.indices + slots.sinks, 1.0 + taken * (ABOVE - 1.0))

    def drop(self, index: "Tensor") -> None:
        """Drop all slots but `index`."""
        from kvsearch.rules.base import pick

        self.most = pick(self.most, index if index.dim() == 1 else index[None])
        super().drop(index)

    def keep(self, index: "Tensor | None") -> None:
        """Drop all slots but `index`, and age the maxima by one compaction."""
        import torch

        super().keep(index)
        if self.forgets:
            self.most = torch.roll(self.most, 1, 0)
            self.most[0] = 0

    @property
    def nbytes(self) -> int:
        """As `critical`, and the maxima."""
        return super().nbytes + self.most.nbytes // max(1, self.most.shape[1])

    def reorder(self, rows: "Tensor") -> None:
        """Select batch rows (beam search)."""
        super().reorder(rows)
        self.most = self.most[:, rows]
