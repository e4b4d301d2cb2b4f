"""Chunks of neighbouring tokens stay or go together (ChunkKV, arXiv:2502.00299).

Tokens that were split apart lose their meaning: a chunk is `length` consecutive tokens of the
stream, and every slot of it ranks by the attention that all of it received.
"""

from collections.abc import Mapping
from math import log2
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from kvsearch.rules.attention import Attention, AttentionScorer
from kvsearch.rules.base import Place, Slots

if TYPE_CHECKING:
    from torch import Tensor


class Chunks(Attention):
    """`attention` with the same fields, summed over chunks of the stream.

    The number of slots is exact: the last chunk to go may lose a part only, its oldest tokens.

    Attributes:
        length: tokens of a chunk; token t of the stream is in chunk `t // length`.
    """

    name: str = "chunks"
    length: int = Field(default=10, ge=1, le=65535)

    paper: ClassVar[str] = "ChunkKV, arXiv:2502.00299"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "chunks": {},
        "chunks-snapkv": dict(horizon=32, share="layer"),
    }
    methods: ClassVar[Mapping[str, tuple[Mapping[str, Any], str]]] = {
        "chunkkv": (
            dict(rule="chunks-snapkv", interval=32, recent_window=32),
            "chunks of 10 tokens stay or go by the attention of the last 32 (arXiv:2502.00299)",
        ),
        "chunkkv-prompt": (
            dict(rule="chunks-snapkv", interval=32, recent_window=32, trigger="prompt"),
            "chunkkv as published: once, after the prompt",
        ),
    }
    axes: ClassVar[Mapping[str, str]] = {**Attention.axes, "length": "chunk"}
    feature_names: ClassVar[tuple[str, ...]] = (*Attention.feature_names, "chunks")
    fast: ClassVar[frozenset[str]] = frozenset()  # the scan ranks slots one by one

    @property
    def together(self) -> int:
        """A chunk."""
        return self.length

    @property
    def ages(self) -> bool:
        """Arrival indices say which chunk a slot is of."""
        return True

    def canonical(self) -> dict[str, Any]:
        """As `attention`, under its own name."""
        return {"name": self.name, **super().canonical()}

    def features(self) -> dict[str, float]:
        """As `attention`, a flag, and the length on a log scale."""
        return {**super().features(), "chunks": 1.0, "chunk": log2(self.length) / 8}

    def family(self) -> str:
        """Whatever the powers."""
        return "ChunkKV-like"

    def words(self) -> list[str]:
        """As `attention`, and the length."""
        return [*super().words(), f"in chunks of {self.length}"]

    def scorer(self, place: Place) -> "ChunksScorer":
        """Running sums and arrival indices per slot."""
        return ChunksScorer(self, place)


class ChunksScorer(AttentionScorer):
    """Sums per slot, as those of `attention`."""

    def __init__(self, rule: Chunks, place: Place) -> None:
        super().__init__(rule, place)
        self.length = rule.length

    def ranks(self, slots: Slots) -> "Tensor":
        """Corrected sums, smoothed outside the recent window, added up over held slots of a chunk.

        The recent window is no part of any chunk.
        """
        import torch

        assert self.born is not None
        score = self.smooth(self.corrected(slots.seen), slots.recent_from)
        stop = max(0, slots.recent_from)
        old, born = score[..., :stop], self.born[..., :stop].long()
        if not stop:
            return score
        chunk = born // self.length
        # numbered without gaps, and every slot has a place of its own: no sum depends on an order
        place = (chunk.diff(dim=-1, prepend=chunk[..., :1]) > 0).cumsum(-1)
        rows = min(stop, slots.seen // self.length + 1)
        grid = old.new_zeros(*old.shape[:-1], rows * self.length)
        grid.scatter_(-1, place * self.length + born % self.length, old)
        sums = grid.unflatten(-1, (rows, self.length)).sum(-1)
        return torch.cat([sums.gather(-1, place), score[..., stop:]], -1)
