"""Probe of `decode_attention`."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvsearch_kernels.budget import HARDWARE, over_budget
from kvsearch_kernels.decode_attention.reference import Part, reference
from kvsearch_kernels.probing import Case, Draw
from kvsearch_kernels.quantize_kv.reference import Format, Packed, dequantize, quantize

Formats = Sequence[tuple[Format | None, Format | None, int]]  # of keys, of values, slots
Mixed = tuple[int, int, Formats]  # head size, query heads per KV head, formats


def lloyd(bits: int, group: int, rotate: bool = True, block: int | None = None) -> Format:
    """Lloyd-Max levels."""
    return Format(bits, group, "lloyd", rotate, block=block)


# keys and values that are rotated in blocks of different size, next to others
BLOCKED: Mixed = (
    64, 2, ((lloyd(4, 64, block=32), lloyd(4, 64, block=16), 70),
            (Format(4, 64), Format(2, 64, rotate=True, block=16), 33)),
)  # fmt: skip
# Four formats a launch, because every set of formats is a compilation of its own.
# Each width with both kinds of levels.
MIXED: tuple[Mixed, ...] = (
    (128, 4, ((None, None, 70), (Format(8, 128), Format(4, 128), 64),
              (lloyd(5, 64), lloyd(4, 64), 300), (lloyd(2, 128), Format(1, 128), 257))),
    (64, 3, ((None, Format(4, 64), 65), (Format(3, 64), Format(3, 32), 70),
             (lloyd(8, 64), lloyd(1, 64), 130), (Format(2, 64), Format(8, 64), 33))),
    (128, 1, ((lloyd(4, 128), lloyd(3, 64), 65), (Format(1, 64), lloyd(2, 128, False), 40),
              (lloyd(3, 128, False), Format(8, 32), 9), (lloyd(1, 128), lloyd(4, 128), 1))),
    (64, 2, ((lloyd(5, 64), lloyd(4, 64), 150), (lloyd(4, 32), lloyd(2, 32), 40),
             (lloyd(2, 64), lloyd(5, 64), 33), (Format(4, 32), Format(2, 32), 65))),
    (128, 2, ((lloyd(4, 32), lloyd(3, 32), 70), (lloyd(5, 32), lloyd(5, 128), 40),
              (Format(3, 128), Format(4, 32), 33), (Format(4, 32), Format(3, 32), 65))),
    BLOCKED,
    (256, 8, ((None, None, 33), (Format(4, 64), Format(4, 64), 129),
              (lloyd(4, 256), lloyd(4, 64), 40))),
)  # fmt: skip


def parts(
    draw: Draw, B: int, H: int, D: int, formats: Formats,
    change: Callable[[int, Tensor, Tensor], None] | None = None,
) -> list[Part]:  # fmt: skip
    """Parts of random keys and values, all slots in use; `change` may write to those of part i."""
    # held in 16 bits also where the queries are fp32, which fp32 models do
    plain = torch.float16 if draw.dtype is torch.float32 and D == 64 else draw.dtype

    def held(x: Tensor, fmt: Format | None) -> Tensor | Packed:
        return x if fmt is None else quantize(x, fmt)

    found = []
    for i, (key, value, n) in enumerate(formats):
        k, v = (draw.normal(B, H, n, D, dtype=plain) for _ in range(2))
        if change is not None:
            change(i, k, v)
        found.append(Part(held(k, key), held(v, value), key, value))
    return found


def with_sinks(draw: Draw, G: int, D: int, formats: Formats) -> tuple[Tensor, list[Part]]:
    """Queries `[1, G * 2, D]` and parts, each with one slot that receives nearly everything.

    The slot's product is about 13 above the others, and its values are close to zero, as those of
    attention sinks are: what the other slots add up to is small, and must still be right.
    """
    along = draw.whole(0, 2, 1, 2, 1, D, dtype=draw.dtype) * 2 - 1
    q = (along + draw.normal(1, 2, G, D) / 4).flatten(1, 2)

    def sink(i: int, k: Tensor, v: Tensor) -> None:
        at = k.shape[2] // (i + 1) - 1
        k[:, :, at : at + 1] = along * (13 * D**-0.5)
        v[:, :, at] *= 2**-12

    return q, parts(draw, 1, 2, D, formats, sink)


def cases(
    device: torch.device, dtype: torch.dtype, mixed: Sequence[Mixed] = MIXED
) -> Iterator[Case]:
    """Every head size, width and kind of level, groups, lengths, softcap, pools, nothing held.

    Gaussian keys, whose attention is flat, and the same formats next to attention sinks.
    """
    for seed, (D, G, formats) in enumerate(mixed):
        draw = Draw(device, dtype, seed)
        q, held = draw.normal(2, G * 2, D), parts(draw, 2, 2, D, formats)
        yield (q, held), {"scale": D**-0.5}
        yield with_sinks(draw, G, D, formats), {"scale": D**-0.5}
        if seed:
            continue
        used = [draw.whole(0, n + 1, 2, 2, dtype=torch.int32) for _, _, n in formats]
        used[1][0] = 0
        some = [replace(p, lengths=n) for p, n in zip(held, used, strict=True)]
        yield (q, some), {"scale": D**-0.5}
        none = [replace(p, lengths=torch.zeros_like(n)) for p, n in zip(held, used, strict=True)]
        yield (q, none), {"scale": D**-0.5}
    draw = Draw(device, dtype, len(mixed))
    q = draw.normal(1, 2, 64)
    (one,) = parts(draw, 1, 2, 64, ((Format(2, 64), Format(2, 64), 200),))
    yield (q, [replace(one, keys=_front(one.keys), values=_front(one.values))]), {"scale": 0.125}
    for n in (1, 300):
        yield (q, parts(draw, 1, 2, 64, ((None, None, n),))), {"scale": 0.125, "softcap": 3.0}


def _front(held: Tensor | Packed) -> Packed:
    """The first slots of a longer pool, as the deployed cache passes them."""
    assert isinstance(held, Packed)
    return Packed(held.codes[:, :, :70], held.scales[:, :, :70])


def widened(part: Part, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values `[B, H, N, D]` of another type, as torch would read a dequantised cache."""

    def wide(held: Tensor | Packed, fmt: Format | None) -> Tensor:
        if isinstance(held, Packed):
            assert fmt is not None
            held = dequantize(held, fmt)
        return held.to(kind)

    return wide(part.keys, part.key_format), wide(part.values, part.value_format)


def eager(
    q: Tensor, parts: Sequence[Part], *, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The same attention the plain way, everything in the type of `q`.

    Returns:
        Output `[B, Hq, D]`, log-sum-exp `[B, Hq]` and received attention `[B, H, N]`.
    """
    k, v = (torch.cat(side, 2) for side in zip(*(widened(p, q.dtype) for p in parts), strict=True))
    B, H = k.shape[:2]
    s = (q * scale).unflatten(1, (H, -1)) @ k.mT
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    used = []
    for part in parts:
        n = widened(part, q.dtype)[0].shape[2]
        lengths = torch.full((B, H), n, device="cpu") if part.lengths is None else part.lengths
        used.append(torch.arange(n, device="cpu") < lengths.unsqueeze(-1))
    s = s.masked_fill(~torch.cat(used, -1).unsqueeze(2), float("-inf"))
    p = s.softmax(-1).nan_to_num()
    return (p @ v).flatten(1, 2), s.logsumexp(-1).flatten(1, 2), p.mean(2)


def differs(
    got: tuple[Tensor, Tensor], q: Tensor, parts: Sequence[Part], *, scale: float,
    softcap: float | None = None,
) -> str | None:  # fmt: skip
    """Why output and log-sum-exp are wrong, or None."""
    exact = reference(q.double(), parts, scale=scale, softcap=softcap)
    out, lse, _ = eager(q, parts, scale=scale, softcap=softcap)
    return over_budget("output", got[0], out, exact[0], slack=HARDWARE) or over_budget(
        "log-sum-exp", got[1], lse, exact[1], slack=HARDWARE
    )
