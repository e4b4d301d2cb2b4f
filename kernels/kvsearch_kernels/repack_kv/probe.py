"""Probe of `repack_kv`."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from kvsearch_kernels.packed_attention.reference import Part, slots_of
from kvsearch_kernels.probing import Case, Draw
from kvsearch_kernels.quantize_kv.probe import MOST_WRONG, steady
from kvsearch_kernels.quantize_kv.reference import Format, quantize
from kvsearch_kernels.repack_kv.reference import Held, NewPool, reference, tensors

Pair = tuple[Format | None, Format | None]


def _even(bits: int, group: int = 32) -> Format:
    return Format(bits, group)


def _lloyd(bits: int) -> Format:
    return Format(bits, 64, "lloyd", rotate=True)


def _blocks(bits: int) -> Format:
    return Format(bits, 32, rotate=True, block=16)


_SMALL = tuple(Format(bits, 8, "lloyd", rotate=True) for bits in (2, 4, 5))

# head size and, of each store, batch rows and heads and the formats of its parts, keys and values;
# every part in turn is what is made. The last are few: what warps share depends on their number
LAYERS: tuple[tuple[int, tuple[tuple[tuple[int, int], tuple[Pair, ...]], ...]], ...] = (
    (64, (
        ((1, 2), ((None, None), (_even(8, 64), _even(4)), (_even(3), _even(5)))),
        ((2, 1), ((_lloyd(5), _blocks(4)), (None, None))),
    )),
    (128, (
        ((1, 2), ((_lloyd(4), _lloyd(2)), (_even(2), _even(1)), (None, None),
                  (_even(4), _lloyd(3)))),
        ((1, 1), ((None, None),)),
    )),
    (64, (((1, 2), ((None, None), (_SMALL[0], _SMALL[2]))),)),
    (64, (((1, 2), ((None, None), (_SMALL[1], _SMALL[1]))),)),
)  # fmt: skip


def cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Every format from every other; slots of all heads and of each; parts that are not alone.

    The pools of a layer are made at once: of two stores, which differ in slots, heads and formats.
    """
    draw = Draw(device, dtype)
    more = {"dtype": dtype, "native": torch.float16 if dtype is torch.float32 else dtype}
    for D, stores in LAYERS:
        pools: list[NewPool] = []
        for heads, formats in stores:
            parts, sizes = [], (19, 7, 40, 5)
            for pair, n in zip(formats, sizes, strict=False):
                keys, values = (_held(draw, D, heads, n, fmt, more["native"]) for fmt in pair)
                parts.append(Part(keys, values, *pair))
            total = sum(sizes[: len(parts)])
            for i, pair in enumerate(formats):
                lists = (draw.whole(0, total, 20), draw.whole(0, total, *heads, 15))
                pools.append(NewPool(lists[i % 2], parts, i, pair))
            others = [p for i, p in enumerate(parts) if i != 1]  # a pool that was empty
            if others:
                some = draw.whole(0, total - sizes[1] * (len(parts) > 1), 1, 1, 14)
                pair = formats[min(1, len(formats) - 1)]
                pools.append(NewPool(some, others, None, pair))
            pools.append(NewPool(draw.whole(0, sizes[0], 9), parts[:1], 0, formats[0]))
        yield (pools,), more
        yield (pools[-1:],), more


def _held(
    draw: Draw, D: int, heads: tuple[int, int], n: int, fmt: Format | None, native: torch.dtype
) -> Held:
    """`n` slots, the front of a pool where they are in 16 bits.

    Packed ones have scales of the sign that a quantiser never writes: who encodes them anew instead
    of moving them cannot come back to the same bytes.
    """
    if fmt is None:
        return draw.normal(*heads, n + 3, D, dtype=native)[:, :, :n]
    packed = quantize(draw.normal(*heads, n, D, dtype=torch.float32), fmt)
    return replace(packed, scales=-packed.scales)


def differs(
    got: Sequence[tuple[Held, Held]], pools: Sequence[NewPool], **more: Any
) -> str | None:  # fmt: skip
    """Why a pool is wrong, or None. What was in it already must be there bit for bit."""
    if len(got) != len(pools):
        return f"{len(got)} pools instead of {len(pools)}"
    wanted = reference(pools, **more)
    return next(filter(None, map(_differs, got, wanted, pools)), None)


def _differs(got: tuple[Held, Held], want: tuple[Held, Held], pool: NewPool) -> str | None:
    """Why this pool is wrong, or None."""
    source, formats = pool.source, pool.formats
    counts = [slots_of(p) for p in pool.parts]
    first = 0 if pool.own is None else sum(counts[: pool.own])
    last = first if pool.own is None else first + counts[pool.own]
    B, H = tensors(want[0])[0].shape[:2]
    moved = ((source >= first) & (source < last)).expand(B, H, source.shape[-1])
    every = [f for p in pool.parts for f in (p.key_format, p.value_format)]
    exact = all(f is None or steady(f) for f in (*every, *formats))
    for what, x, y in zip(("keys", "values"), got, want, strict=True):
        for mine, right in zip(tensors(x), tensors(y), strict=True):
            if mine.shape != right.shape or mine.dtype is not right.dtype:
                return f"shape or type of {what} is wrong in {formats}"
            same = (mine == right).all(-1)
            if not bool(same[moved].all()):
                return f"{what} that move are not those of the slots, in {formats}"
            if mine.dtype is torch.uint8 or exact:
                if (~same).float().mean() > (0 if exact else MOST_WRONG):
                    return f"{what} have other codes than the reference, in {formats}"
            elif not torch.allclose(mine.float(), right.float(), rtol=2e-3, atol=1e-3):
                return f"{what} or their scales are wrong, in {formats}"
    return None
