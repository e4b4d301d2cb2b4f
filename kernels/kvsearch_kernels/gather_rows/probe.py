"""Probe of `gather_rows`."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvsearch_kernels.gather_rows.reference import Rows, reference
from kvsearch_kernels.probing import Case, Draw

# Elements of a row, rows of each part, and the shape of the source, of 2 batch rows and 3 heads:
# rows of any number of bytes, fewer and more rows than a program copies
BYTES = ((64, (70,), (33,)), (20, (9, 40), (2, 3, 65)), (3, (5, 1, 7, 2), (1, 1, 21)),
         (1, (40,), (2, 3, 1)))  # fmt: skip
SCALES = ((1, (9, 40), (2, 3, 65)), (2, (70,), (33,)), (12, (5, 1, 7, 2), (1, 3, 21)))
VECTORS = ((128, (30, 7), (2, 3, 80)), (64, (5, 1, 7, 2), (2, 1, 9)), (24, (4,), (0,)))


def cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Codes, scales and vectors at once; some alone; vectors are the front of pools."""
    draw = Draw(device, dtype)
    plain = torch.float32 if dtype is torch.uint8 else dtype
    kinds = ((torch.uint8, BYTES), (torch.float16, SCALES), (plain, VECTORS))
    asked = []
    for kind, tensors in kinds:
        for wide, counts, shape in tensors:
            parts = [_part(draw, n, wide, kind) for n in counts]
            asked.append(Rows(parts, draw.whole(0, sum(counts), *shape)))
    yield (asked,), {}
    yield (asked[:1],), {}
    yield ([x for x in reversed(asked) if x.parts[0].dtype is not torch.uint8],), {}
    yield (asked[-1:],), {}


def _part(draw: Draw, n: int, wide: int, kind: torch.dtype) -> Tensor:
    """Rows `[2, 3, n, wide]`."""
    if kind is torch.uint8:
        return draw.whole(0, 256, 2, 3, n, wide, dtype=kind)
    return draw.normal(2, 3, n + 3, wide, dtype=kind)[:, :, :n]


def differs(got: Sequence[Tensor], asked: Sequence[Rows]) -> str | None:
    """Why some rows are wrong, or None."""
    if len(got) != len(asked):
        return f"{len(got)} tensors instead of {len(asked)}"
    for x, want, rows in zip(got, reference(asked), asked, strict=True):
        if x.shape != want.shape or x.dtype is not want.dtype or not torch.equal(x, want):
            first = rows.parts[0]
            return f"rows of {first.shape[-1]} {first.dtype} are not those that were asked for"
    return None
