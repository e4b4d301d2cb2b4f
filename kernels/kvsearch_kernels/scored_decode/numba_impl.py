"""Implementation of `scored_decode` for a CPU: the loop of `decode_attention` knows the answer."""

from collections.abc import Sequence

from torch import Tensor

from kvsearch_kernels.decode_attention.numba_impl import attend, why_not
from kvsearch_kernels.decode_attention.reference import Part
from kvsearch_kernels.room import Room, kept

__all__ = ["forward", "why_not"]


def forward(
    q: Tensor, parts: Sequence[Part], *, scale: float, softcap: float | None = None,
    room: Room | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `reference`."""
    out, _, received = attend(q, parts, scale, softcap, scores=True)
    return kept(room, "out", out), kept(room, "received", received)
