"""What the benchmark times of a decoded token: all heads of a layer, by one op.

`decode_step` writes to what it is given, and a replayed graph would run past the end of its pools.
So every timed call begins with one copy of 4 bytes a KV head that sets their lengths back.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
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
        bits: of the one tier; 16 is a pool alone.
        rotate: rotated Lloyd levels.
        scored: a rule adds up what slots receive.
        kinds: heads that differ in slots, from a fraction of the mean to nearly twice as many.
        turned: keys carry no angle.
        along: keys are grouped along tokens, as in KIVI.
    """

    bits: int
    rotate: bool = False
    scored: bool = False
    kinds: int = 1
    turned: bool = False
    along: bool = False

    def formats(self, D: int) -> tuple[Format, Format]:
        """Of keys and values in the tier."""
        if self.along:
            return Format(self.bits, 32, along="tokens"), Format(self.bits, 32)
        one = Format(self.bits, D, "lloyd" if self.rotate else "uniform", self.rotate)
        return one, one


VARIANTS = {  # in order of priority: what searches find, what it is compared with, the rest
    "r4 scored, 4 kinds": Variant(4, rotate=True, scored=True, kinds=4),
    "16": Variant(16),
    "r4 scored": Variant(4, rotate=True, scored=True),
    "4": Variant(4),
    "16 scored": Variant(16, scored=True),
    "r3 scored": Variant(3, rotate=True, scored=True),
    "kivi4": Variant(4, along=True),
    "4, positions of the cache": Variant(4, turned=True),
}
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
    in_use = [n if how.bits == 16 else ROOM // 2 for n in sizes]
    counts = [B * (stop - first) for first, stop in pairwise(edges)]
    start = torch.tensor(in_use, dtype=torch.int32).repeat_interleave(torch.tensor(counts))
    start = start.to(k.device)
    lengths, found, nbytes = start.clone(), [], 0
    each = zip(pairwise(edges), sizes, lengths.split(counts), strict=True)
    for (first, stop), n, mine in each:
        room = n + 1 if how.bits == 16 else ROOM
        pools = [x[:, first:stop].contiguous() for x in pair(room)]
        parts = [Part(*pools, lengths=mine.view(B, stop - first))]
        nbytes += sum(x.nbytes * (n if how.bits == 16 else ROOM // 2) // room for x in pools)
        if how.bits < 16:
            forms = how.formats(D)
            held = [packed(x[:, first:stop], f) for x, f in zip(pair(n), forms, strict=True)]
            parts = [Part(*held, *forms), *parts]
            nbytes += sum(x.nbytes for x in held)
        before = n if how.bits < 16 else 0
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
