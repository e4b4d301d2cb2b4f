"""What the benchmark times of a compaction: which slots stay, and where these are then held."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from kvsearch_kernels.choose_slots import Ask, Sums, choose_slots
from kvsearch_kernels.evict_in_place import Evictions, evict_in_place
from kvsearch_kernels.evict_in_place.probe import cases as proofs
from kvsearch_kernels.op import Op
from kvsearch_kernels.packed_attention import Part
from kvsearch_kernels.quantize_kv import Format, Packed
from kvsearch_kernels.repack_kv import NewPool, repack_kv

OPS: tuple[Op[Any, Any], ...] = (evict_in_place, repack_kv, choose_slots)
INTERVAL = 16  # tokens between compactions
TINY = 128  # slots of cases that are compared with the reference are fewer
INTERVALS = 64  # that `evict_in_place` goes through
SHAPES = ((1024, 1), (1024, 8), (4080, 8))  # slots and sequences
VARIANTS = {
    "evict_in_place": (f"{INTERVALS} intervals",),
    "repack_kv": ("4", "r4"),
    "choose_slots": ("evict", "tiers"),
}


def shapes(op: str) -> Iterator[tuple[int, int, str]]:
    """Slots, sequences and variant of each case of an op."""
    for slots, batch in SHAPES:
        for variant in VARIANTS[op]:
            yield slots, batch, variant


def arguments(
    op: str, variant: str, fmt: Format | None, pair: Callable[[int], tuple[Tensor, Tensor]],
    slots: int, queries: int, packed: Callable[[Tensor, Format], Packed],
) -> tuple[Any, ...]:  # fmt: skip
    """Arguments of one compaction that drops as many slots as came, and the bytes it must read.

    `evict_in_place` does many; what it has written is put back by the last of what this returns.

    Args:
        op, variant: what to time.
        fmt: the format that `variant` names, if it names one.
        pair: makes keys and values `[B, H, n, D]`.
        slots: that stay.
        queries: heads of them for each head of keys.
        packed: packs keys or values.
    """
    new = min(INTERVAL, slots // 4)
    n = slots + new
    k, v = pair(n)
    B, H, _, D = k.shape
    device = k.device
    if op == "evict_in_place" and slots < TINY:  # only its probe knows what it has written over
        found = (args for args, _ in proofs(device, k.dtype) if args[0].shape[-1] == D)
        return next(found), {}, 0
    if op == "evict_in_place":
        return _evictions(k, v, new, queries)
    if op == "repack_kv":
        assert fmt is not None
        k, v = pair(slots)
        tier = Part(packed(k, fmt), packed(v, fmt), fmt, fmt)
        fresh = Part(*pair(new))
        stay = torch.rand(B, H, n, device=device).argsort(-1)[..., :slots].sort(-1).values
        more = {"dtype": k.dtype, "native": k.dtype}
        nbytes = tier.keys.nbytes + tier.values.nbytes + fresh.keys.nbytes + fresh.values.nbytes
        return ([NewPool(stay, [tier, fresh], 0, (fmt, fmt))],), more, nbytes
    scores = torch.rand(B, H, n, device=device)
    before = torch.randint(0, 3, (B, H, n), device=device).byte()
    counts = (slots // 4, slots - slots // 4) if variant == "tiers" else ()
    born = torch.arange(n, dtype=torch.int32, device=device).expand(B, H, n).contiguous()
    ages = torch.arange(1, n + 2, device=device).float()
    places = torch.rand(B, H, n, device=device).argsort(-1)
    ask = Ask(
        scores, before, new, recent=new, counts=counts, room=n, places=places,
        held=Sums(scores, born, n, divisors=ages),
    )  # fmt: skip
    return ([ask],), {}, sum(x.nbytes for x in (scores, before, born, places))


def _evictions(k: Tensor, v: Tensor, new: int, queries: int) -> tuple[Any, ...]:
    """Slots that are full, and as many new tokens in every interval as are evicted."""
    B, H, n, D = k.shape
    J, device = INTERVALS, k.device
    sums = torch.rand(B, H, n, device=device)
    born = torch.arange(n, device=device).expand(B, H, n).contiguous()
    before = sums.clone(), born.clone()
    q = torch.randn(J, B * H, queries * new, D, device=device, dtype=k.dtype) * D**-0.5
    fresh = torch.randn(J, 2, B, H, new, D, device=device, dtype=k.dtype)
    how = Evictions(seen=n - new, first=4, last=n, recent=new)
    args = (torch.stack([k, v]), sums, born, q, fresh, fresh, torch.ones(new, device=device), how)

    def first() -> None:
        for x, y in zip((sums, born), before, strict=True):
            x.copy_(y)

    return args, {}, J * (k.nbytes + v.nbytes), {}, first
