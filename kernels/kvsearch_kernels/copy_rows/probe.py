"""Probe of `copy_rows`."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kvsearch_kernels.copy_rows.reference import Copy
from kvsearch_kernels.probing import Case, Draw

SHAPES = (
    ((2, 3, 70, 128), torch.float16), ((2, 3, 5, 3), torch.uint8), ((1,), torch.int64),
    ((4, 1, 2, 301), torch.float32), ((2, 9000), torch.uint8), ((3, 0, 8), torch.int32),
    ((1, 262_150), torch.uint8), ((2, 140_000), torch.float16),  # more than a row of the table
)  # fmt: skip


def cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Whole tensors, the front of pools, every second row; numbers. All at once, and some alone.

    Sizes in bytes are multiples of 16, of 4, and of neither. No case finds what another has copied.
    """
    draw = Draw(device, dtype)
    for some in (slice(None), slice(2), slice(7, 8), slice(-1, None)):
        yield (_copies(draw)[some],), {}


def _copies(draw: Draw) -> list[Copy]:
    copies = list[Copy]()
    for shape, kind in SHAPES:
        wide = (*shape[:-1], shape[-1] + 3)
        for to, of in ((shape, shape), (shape, wide), (wide, shape)):
            at, new = (draw.whole(0, 100, *x, dtype=kind)[..., : shape[-1]] for x in (to, of))
            copies.append(Copy(at, new))
    rows = draw.whole(0, 9, 6, 2, 50, dtype=torch.float32)
    copies.append(Copy(rows[::2], draw.whole(0, 9, 3, 2, 50, dtype=torch.float32)))
    for number, shape in ((-7, (2, 3)), (1 << 30, (70_000,))):
        copies.append(Copy(draw.whole(0, 9, *shape, dtype=torch.int32), number))
    return copies


def differs(got: Any, copies: Sequence[Copy]) -> str | None:
    """Why something was not written, or None."""
    for copy in copies:
        want = copy.of if isinstance(copy.of, Tensor) else torch.full_like(copy.to, copy.of)
        if not torch.equal(copy.to, want):
            return f"not all of {tuple(copy.to.shape)} {copy.to.dtype} was written"
    return None
