"""What the benchmark times of a decoded token: all heads of a layer, by one op.

`decode_step` writes to what it is given, and a replayed graph would run past the end of its pools.
So every timed call begins with one copy of 4 bytes a KV head that sets their lengths back.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kvsearch_kernels.decode_step import Heads, Stores, Sums, Turned, probe
from kvsearch_kernels.packed_attention import Part
from kvsearch_kernels.quantize_kv import Format, Packed

ROOM = 16  # tokens between compactions; half of them are there


@dataclass(frozen=True)
class Variant:
    """How a layer is stored.

    Attributes:
        tiers: share of slots, and format of keys and values, of each; a pool in 16 bits is beside
            them, or has all slots where there are none.
        scored: a rule adds up what slots receive.
        kinds: heads that differ in slots, from a fraction of the mean to nearly twice as many.
        turned: keys carry no angle.
    """

    tiers: tuple[tuple[float, str], ...] = ()
    scored: bool = False
    kinds: int = 1
    turned: bool = False


# In order of priority: what searches find, what it is compared with, the rest. `r` is a rotated
# format with Lloyd levels, `kivi` has keys that are grouped along tokens.
VARIANTS = {
    "r4 scored, 4 kinds": Variant(((1.0, "r4"),), scored=True, kinds=4),
    "16": Variant(),
    "r4 scored": Variant(((1.0, "r4"),), scored=True),
    "4": Variant(((1.0, "4"),)),
    "r4": Variant(((1.0, "r4"),)),
    "16 scored": Variant(scored=True),
    "r3 scored": Variant(((1.0, "r3"),), scored=True),
    "r3": Variant(((1.0, "r3"),)),
    "60%8+4": Variant(((0.6, "8"), (0.4, "4"))),
    "8": Variant(((1.0, "8"),)),
    "2": Variant(((1.0, "2"),)),
    "1": Variant(((1.0, "1"),)),
    "20%4+1": Variant(((0.2, "4"), (0.8, "1"))),
    "kivi4": Variant(((1.0, "kivi4"),)),
    "4, positions of the cache": Variant(((1.0, "4"),), turned=True),
}


def form(name: str, D: int) -> Format:
    """The format called `name`; of `kivi` that of values."""
    if name.startswith("kivi"):
        return Format(int(name[4:]), 32)
    if name.startswith("r"):
        return Format(int(name[1:]), D, "lloyd", True)
    return Format(int(name), D)


Arguments = tuple[tuple[Any, ...], dict[str, Any], int, Callable[[], Any]]


def arguments(
    variant: str, q: Tensor, pair: Callable[[int], tuple[Tensor, Tensor]], slots: int,
    packed: Callable[[Tensor, Format], Packed],
) -> Arguments:  # fmt: skip
    """Arguments of one token, the bytes that it must read, and what sets lengths back.

    Args:
        variant: how the layer is stored.
        q: queries `[B, Hq, D]`.
        pair: makes keys and values `[B, H, n, D]`.
        slots: of a head, about.
        packed: packs keys or values.
    """
    how, (k, v) = VARIANTS[variant], pair(1)
    B, H, _, D = k.shape
    kinds = min(how.kinds, H)
    edges = [H * i // kinds for i in range(kinds + 1)]
    sizes = [round(2 * slots * (i + 1) / (kinds + 1)) for i in range(kinds)]
    in_use = [ROOM // 2 if how.tiers else n for n in sizes]
    counts = [B * (stop - first) for first, stop in pairwise(edges)]
    start = torch.tensor(in_use, dtype=torch.int32).repeat_interleave(torch.tensor(counts))
    start = start.to(k.device)
    lengths, found, nbytes = start.clone(), [], 0
    each = zip(pairwise(edges), sizes, lengths.split(counts), strict=True)
    for (first, stop), n, mine in each:
        room = ROOM if how.tiers else n + 1
        pools = [x[:, first:stop].contiguous() for x in pair(room)]
        parts, before = list[Part](), 0
        nbytes += sum(x.nbytes * (ROOM // 2 if how.tiers else n) // room for x in pools)
        for share, name in how.tiers:
            fmt, count = form(name, D), max(1, round(share * n))
            forms = (replace(fmt, along="tokens") if name.startswith("kivi") else fmt, fmt)
            x, y = pair(count)
            held = packed(x[:, first:stop], forms[0]), packed(y[:, first:stop], fmt)
            parts.append(Part(*held, *forms))
            before += count
            nbytes += sum(side.nbytes for side in held)
        parts.append(Part(*pools, lengths=mine.view(B, stop - first)))
        sums = None
        if how.scored:
            zeros = torch.zeros(B, stop - first, before + room, device=k.device)
            sums = Sums(zeros, None, before, room, 1.0, None, 1.0)
        turned = None
        if how.turned:
            inv_freq = 1e4 ** (-torch.arange(D // 2, device=k.device) / (D // 2))
            turned = Turned(inv_freq, None, before, 1000)
        found.append(Heads(parts, sums, turned))
    args = (q, k, v, Stores(found))
    return args, {"scale": D**-0.5}, nbytes, lambda: lengths.copy_(start)


def differs(
    run: Callable[[], Tensor], on_cpu: Callable[[Any], Any], args: tuple[Any, ...], scale: float
) -> str | None:
    """Why what a token gives, or what it writes to `args`, is wrong; or None."""
    q, k, v, before = deepcopy(on_cpu(args))
    got = on_cpu(run())
    return probe.compared(got, on_cpu(args)[3], (q, k, v), before, deepcopy(before), scale=scale)
