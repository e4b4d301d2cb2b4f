"""Probe of `repack_kv`."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kvsearch_kernels.decode_attention.reference import Part, slots_of
from kvsearch_kernels.probing import Case, Draw
from kvsearch_kernels.quantize_kv.probe import MOST_WRONG, steady
from kvsearch_kernels.quantize_kv.reference import Format, Packed, quantize
from kvsearch_kernels.repack_kv.reference import Held, reference

Pair = tuple[Format | None, Format | None]


def _even(bits: int, group: int = 32) -> Format:
    return Format(bits, group)


def _lloyd(bits: int) -> Format:
    return Format(bits, 64, "lloyd", rotate=True)


# formats of the parts, keys and values; every part in turn is what is made
LAYERS: tuple[tuple[int, tuple[Pair, ...]], ...] = (
    (64, ((None, None), (_even(8, 64), _even(4)), (_even(3), _even(5)))),
    (128, ((_lloyd(4), _lloyd(2)), (_even(2), _even(1)), (None, None), (_even(4), _lloyd(3)))),
)


def cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Every format from every other; slots of all heads and of each; parts that are not alone."""
    draw = Draw(device, dtype)
    more = {"dtype": dtype, "native": torch.float16 if dtype is torch.float32 else dtype}
    for D, formats in LAYERS:
        parts, sizes = [], (19, 7, 40, 5)
        for pair, n in zip(formats, sizes, strict=False):
            keys, values = (_held(draw, D, n, fmt, more["native"]) for fmt in pair)
            parts.append(Part(keys, values, *pair))
        total = sum(sizes[: len(parts)])
        for i, pair in enumerate(formats):
            per_head = draw.whole(0, total, 1, 2, 15)
            yield (per_head if i % 2 else draw.whole(0, total, 20), parts, i, pair), more
        others = [p for i, p in enumerate(parts) if i != 1]  # a pool that was empty
        start = total - sizes[1]
        yield (draw.whole(0, start, 1, 1, 14), others, None, formats[1]), more
        yield (draw.whole(0, sizes[0], 9), parts[:1], 0, formats[0]), more


def _held(draw: Draw, D: int, n: int, fmt: Format | None, native: torch.dtype) -> Held:
    """`n` slots of two heads, the front of a pool where they are in 16 bits."""
    if fmt is None:
        return draw.normal(1, 2, n + 3, D, dtype=native)[:, :, :n]
    return quantize(draw.normal(1, 2, n, D, dtype=torch.float32), fmt)


def differs(
    got: tuple[Held, Held], source: Tensor, parts: Sequence[Part], own: int | None,
    formats: Pair, **more: Any,
) -> str | None:  # fmt: skip
    """Why the pool is wrong, or None. What was in it already must be there bit for bit."""
    want = reference(source, parts, own, formats, **more)
    counts = [slots_of(p) for p in parts]
    first = 0 if own is None else sum(counts[:own])
    last = first if own is None else first + counts[own]
    B, H = tensors(want[0])[0].shape[:2]
    moved = ((source >= first) & (source < last)).expand(B, H, source.shape[-1])
    every = [f for p in parts for f in (p.key_format, p.value_format)]
    exact = all(f is None or steady(f) for f in (*every, *formats))
    for what, x, y in zip(("keys", "values"), got, want, strict=True):
        for mine, right in zip(tensors(x), tensors(y), strict=True):
            if mine.shape != right.shape or mine.dtype is not right.dtype:
                return f"shape or type of {what} is wrong in {formats}"
            same = (mine == right).flatten(3).all(-1)
            if not bool(same[moved].all()):
                return f"{what} that move are not those of the slots, in {formats}"
            if mine.dtype is torch.uint8 or exact:
                if (~same).float().mean() > (0 if exact else MOST_WRONG):
                    return f"{what} have other codes than the reference, in {formats}"
            elif not torch.allclose(mine.float(), right.float(), rtol=2e-3, atol=1e-3):
                return f"{what} or their scales are wrong, in {formats}"
    return None


def tensors(held: Held) -> tuple[Tensor, ...]:
    """What is held, as tensors with a row for each slot."""
    return (held.codes, held.scales) if isinstance(held, Packed) else (held,)
