"""Running sums of what slots receive, which a fused loop or a decoded token may read and write."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from kvsearch_kernels.choose_slots import Sums


class RunningSums:
    """Partial sums and births of slots, with room for tokens to come.

    A rule that keeps nothing else of what slots receive is faster for giving them
    (`Scorer.running`): a decoded token adds to `room` and counts itself in `count`, in place of
    `Scorer.observe`; and a compaction may move them, in place of `Scorer.keep`.

    Args:
        sums: `[R, B, V, N]` fp32, the newest partial sum first; `V` is KV heads or 1.
        born: arrival index of each slot's token `[B, V, N]` int32; None if age plays no role.
        alpha: power of the number of slots that a token sees, in what its votes count.
        horizon: last tokens before a compaction that count; None is all.
        decay: factor on the sums before a token.
        divisors: gives a table by age `[A]` fp32, up to an age at least: a sum divided by its
            slot's is its rank. None where ranks follow in another way.

    Attributes:
        count: slots in use.
        alone: whether nothing else of the rule moves with the slots.
    """

    def __init__(
        self,
        sums: "Tensor",
        born: "Tensor | None",
        *,
        alpha: float = 0.0,
        horizon: int | None = None,
        decay: float = 1.0,
        divisors: "Callable[[int], Tensor] | None" = None,
    ) -> None:
        self.alpha, self.horizon, self.decay, self.divisors = alpha, horizon, decay, divisors
        self.alone = True
        self.hold(sums, born)

    def hold(self, sums: "Tensor", born: "Tensor | None", count: int | None = None) -> None:
        """Hold others, `[B, V, N]` if there is one sum; the first `count` slots are in use."""
        self._sums = sums if sums.dim() == 4 else sums[None]
        self._born, self.count = born, sums.shape[-1] if count is None else count

    @property
    def sums(self) -> "Tensor":
        """Of the slots in use `[R, B, V, N]`."""
        whole = self.count == self._sums.shape[-1]
        return self._sums if whole else self._sums[..., : self.count]

    @property
    def born(self) -> "Tensor | None":
        """Of the slots in use `[B, V, N]`."""
        return None if self._born is None else self._born[..., : self.count]

    @property
    def births(self) -> "Tensor | None":
        """`born` of slots to come, too, as far as there is room."""
        return self._born

    def room(self, seen: int, slots: int) -> "Tensor":
        """The newest sums `[B, V, slots]`; the next token of those to come is born at `seen`."""
        import torch

        if self._sums.shape[-1] != slots:
            n, born = self.count, self.born
            if born is not None:
                new = torch.arange(seen, seen + slots - n, dtype=born.dtype, device=born.device)
                born = torch.cat([born, new.expand(*born.shape[:-1], -1)], -1)
            self.hold(torch.constant_pad_nd(self.sums, (0, slots - n)), born, n)
        return self._sums[0]

    def moving(self, seen: int) -> "Sums | None":
        """What `choose_slots` moves after `seen` tokens; None of partial sums, and of fp64 ones."""
        import torch

        from kvsearch_kernels.choose_slots import Sums

        if not self.alone or len(self._sums) > 1 or self._sums.dtype is not torch.float32:
            return None
        table = None if self.divisors is None else self.divisors(seen)
        return Sums(self.sums[0], self.born, seen, self.horizon is not None, table)

    def reorder(self, rows: "Tensor") -> None:
        """Select batch rows (beam search)."""
        self.hold(self.sums[:, rows], None if self.born is None else self.born[rows])
