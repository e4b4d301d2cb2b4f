"""Implementation of `scored_decode` for a CPU: the loop of `decode_attention` knows the answer."""

from collections.abc import Sequence

from torch import Tensor

from kvsearch_kernels.decode_attention.numba_impl import attend, why_not
from kvsearch_kernels.decode_attention.reference import Part

__all__ = ["forward", "why_not"]


def forward(
    q: Tensor, parts: Sequence[Part], *, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """As `reference`."""
    out, _, received = attend(q, parts, scale, softcap, scores=True)
    return out, received
