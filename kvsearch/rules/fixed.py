"""Scores that are known when a token arrives, and never change."""

from typing import TYPE_CHECKING

from kvsearch.rules.base import Scorer, Segment, Slots

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SCORE_BYTES = 4  # fp32


class FixedScorer(Scorer):
    """Scores `[B, V, N]` fp32 of the slots; `V` is KV heads, or 1 when they vote together.

    Args:
        batch: sequences, `B`.
        voters: `V`.
        device: of the scores.
    """

    def __init__(self, batch: int, voters: int, device: "torch.device") -> None:
        import torch

        self.scores = torch.zeros((batch, voters, 0), device=device, dtype=torch.float32)

    def arriving(self, segment: Segment) -> "Tensor":
        """Scores of the segment's tokens `[B, V, M]` fp32."""
        raise NotImplementedError

    def observe(self, segment: Segment) -> None:
        """Take in the scores of the new tokens."""
        import torch

        self.scores = torch.cat([self.scores, self.arriving(segment)], -1)

    def ranks(self, slots: Slots) -> "Tensor":
        """The scores."""
        return self.scores

    def keep(self, index: "Tensor | None") -> None:
        """Drop all slots but `index`."""
        from kvsearch.rules.base import pick

        if index is not None:
            self.scores = pick(self.scores, index)

    @property
    def nbytes(self) -> int:
        """Per sequence."""
        return self.scores.nbytes // max(1, self.scores.shape[0])

    def reorder(self, rows: "Tensor") -> None:
        """Select batch rows (beam search)."""
        self.scores = self.scores[rows]
