# mypy: ignore-errors
"""How kernels read the tables of `addresses`."""

import triton
import triton.language as tl


@triton.jit
def pointer(at, kind: tl.constexpr, BYTES: tl.constexpr):
    """What an address in a table points to: rows of `BYTES`, so it divides by that, up to 16.

    The hint is for the pointer: Triton forgets what is said about an integer that becomes one, and
    would load byte by byte.
    """
    EVEN: tl.constexpr = 16 if BYTES % 16 == 0 else (8 if BYTES % 8 == 0 else 4)
    found = tl.load(at).to(tl.pointer_type(kind))
    return tl.multiple_of(found, EVEN if BYTES % 4 == 0 else 2)
