"""Implementation of `gather_rows` for a CPU, tensor by tensor; importing it imports no numba."""

from collections.abc import Sequence

from torch import Tensor

from kvsearch_kernels.gather_kv import numba_impl as gather_kv
from kvsearch_kernels.gather_rows.reference import Rows, joined

__all__ = ["forward", "why_not"]


def why_not(asked: Sequence[Rows]) -> str | None:
    """Reason why these arguments cannot be taken, or None."""
    every = ((part, x.source) for x in asked for part in x.parts)
    return next(filter(None, (gather_kv.why_not(*x) for x in every)), None)


def forward(asked: Sequence[Rows]) -> list[Tensor]:
    """As `reference`."""
    return [gather_kv.forward(joined(x.parts), x.source) for x in asked]
