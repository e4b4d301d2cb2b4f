"""Meaning of `gather_rows`."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvsearch_kernels.gather_kv.reference import reference as gather_kv


@dataclass(frozen=True)
class Rows:
    """Rows to copy, and where they are.

    Attributes:
        parts: what they are taken from, at most four tensors `[B, H, N, w]` of one type, alike but
            for their rows: vectors, codes or scales.
        source: for each row of the result, where it is when the parts follow one another, `[n]` or
            per head `[B or 1, H or 1, n]`, int64.
    """

    parts: Sequence[Tensor]
    source: Tensor


def reference(asked: Sequence[Rows]) -> list[Tensor]:
    """The rows that are asked for, `[B, H, n, w]` each, in new memory."""
    return [gather_kv(joined(x.parts), x.source) for x in asked]


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Parts one after the other, copied only if there are several."""
    return parts[0] if len(parts) == 1 else torch.cat([*parts], 2)
