"""Triton implementation of `decode_step`; importing it imports no Triton.

Three launches serve all heads of a layer, and a fourth where their rule asks what slots received.
Between two compactions nothing is made on the host: where everything lies is in a table on the
device (`table`).
"""

from dataclasses import dataclass
from functools import partial
from math import gcd

import torch
from torch import Tensor

from kvsearch_kernels.append_kv.reference import check_room
from kvsearch_kernels.configs import RECEIVE_COLUMNS, RECEIVE_WARPS, Tile, decode_tile
from kvsearch_kernels.decode_attention.reference import Part, check_lengths, slots_of
from kvsearch_kernels.decode_attention.triton_impl import constants, levels_on
from kvsearch_kernels.decode_attention.triton_impl import why_not as why_not_attend
from kvsearch_kernels.decode_step.reference import Heads, Stores, Sums
from kvsearch_kernels.decode_step.table import Table, kinds_of, made, rows_at, sides_of
from kvsearch_kernels.launch import (
    ampere,
    ceil_div,
    emulated,
    on,
    rows_last,
    why_not_here,
)
from kvsearch_kernels.room import Room, taken

__all__ = ["emulated", "forward", "why_not"]

MOST_KINDS = 8  # pairs of formats in a layer: each is code of its own in one kernel
ORDER = ("KB", "KG", "KL", "KF", "VB", "VG", "VL", "VF")  # of a kind's constants in the kernel


def why_not(
    q: Tensor, k: Tensor, v: Tensor, stores: Stores, *, scale: float, softcap: float | None = None,
    room: Room | None = None,
) -> str | None:  # fmt: skip
    """Reason why these arguments cannot be taken, or None."""
    if reason := why_not_here(q, k, v):
        return reason
    asked = (q.shape, q.dtype, q.device, k.shape, v.shape, scale, softcap)
    if stores.known.get("taken by triton") == asked:
        return None
    if k.shape != v.shape or k.dim() != 4 or k.shape[2] != 1:
        return f"k and v must be one token [B, H, 1, D], got {tuple(k.shape)}, {tuple(v.shape)}"
    if q.dim() != 3 or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        return f"q must be [B, Hq, D], of {k.shape[1]} KV heads, got {tuple(q.shape)}"
    first, group = 0, q.shape[1] // k.shape[1]
    for heads in stores.heads:
        if reason := _why_not_pool(heads, k):
            return reason
        count = heads.parts[-1].keys.shape[1]  # type: ignore[union-attr]
        mine = q[:, first * group : (first + count) * group]
        if reason := why_not_attend(mine, heads.parts, scale=scale, softcap=softcap):
            return reason
        if reason := next(filter(None, map(_why_not_rows, heads.parts)), None):
            return reason
        if heads.sums is not None and (reason := _why_not_sums(heads.sums, heads)):
            return reason
        first += count
    if first != k.shape[1]:
        return f"stores of {first} KV heads do not take {k.shape[1]}"
    if reason := _why_not_together(stores):
        return reason
    stores.known["taken by triton"] = asked
    return None


def _why_not_pool(heads: Heads, k: Tensor) -> str | None:
    """Reason why a token cannot be stored in these heads."""
    pool = heads.parts[-1]
    if not isinstance(pool.keys, Tensor) or not isinstance(pool.values, Tensor):
        return "the last part must be in 16 bits"
    if pool.keys.shape[2] == 0 or pool.lengths is None:
        return "the last part must have slots, and lengths"
    if pool.keys.shape[-1] != k.shape[-1] or pool.values.shape[-1] != k.shape[-1]:
        return f"pools must have {k.shape[-1]} channels, got {pool.keys.shape[-1]}"
    return None


def _why_not_rows(part: Part) -> str | None:
    """Reason why the rows of a part cannot be found by the address of each head's first."""
    for x in sides_of(part):
        wide = x.shape[-1]
        if x.stride(-1) != 1 or (x.shape[2] > 1 and x.stride(2) != wide):
            return f"slots of a head must follow one another, got strides {x.stride()}"
        if x.numel() and (rows_at(x) % gcd(16, wide * x.element_size())).any():
            return f"rows of {wide} x {x.element_size()} bytes must start at a multiple of that"
    used = part.lengths
    if used is not None and (used.dtype is not torch.int32 or not used.is_contiguous()):
        return f"lengths must be contiguous int32, got {used.dtype}"
    return None


def _why_not_sums(sums: Sums, heads: Heads) -> str | None:
    """Reason why what slots receive cannot be added up."""
    B, H = heads.parts[-1].keys.shape[:2]  # type: ignore[union-attr]
    N, order = sum(map(slots_of, heads.parts)), sums.order
    if reason := why_not_here(sums.sums, *([] if order is None else [order])):
        return reason
    if sums.sums.dtype is not torch.float32 or sums.sums.shape not in ((B, H, N), (B, 1, N)):
        return f"sums must be [{B}, {H} or 1, {N}] float32, got {tuple(sums.sums.shape)}"
    if N > 1 and sums.sums.stride(-1) != 1:
        return "the last axis of sums must be contiguous"
    if order is None:
        return None
    V = sums.sums.shape[1]
    heads_of = order.shape[:-1] in ((), (1, 1), (B, 1), (1, V), (B, V))
    if order.dtype is not torch.int64 or order.shape[-1] != N or not heads_of:
        return f"order must be [{N}] or [B, {V}, {N}] int64, got {tuple(order.shape)} {order.dtype}"
    return None if N == 1 or order.stride(-1) == 1 else "the last axis of order must be contiguous"


def _why_not_together(stores: Stores) -> str | None:
    """Reason why the stores of a layer cannot be served by one launch."""
    pools = [h.parts[-1].keys for h in stores.heads]
    types = {x.dtype for h in stores.heads for p in h.parts for x in (p.keys, p.values)
             if isinstance(x, Tensor)}  # fmt: skip
    if len(types) > 1:
        return f"16-bit parts must be of one type, got {sorted(map(str, types))}"
    if len({x.device for x in pools}) > 1:  # type: ignore[union-attr]
        return "stores are on different devices"
    if (kinds := len(kinds_of(stores))) > MOST_KINDS:
        return f"there must be at most {MOST_KINDS} pairs of formats in a layer, got {kinds}"
    rules = {(s.alpha, s.keep) for h in stores.heads if (s := h.sums) is not None}
    return f"sums must be weighted alike, got {sorted(rules)}" if len(rules) > 1 else None


@dataclass(frozen=True)
class _Plan:
    """What a layer's launches take, from one description of it to the next.

    Attributes:
        table: where everything lies.
        tile: of the kernel that reads keys and values.
        kinds: constants of each pair of formats, and whether keys are rotated.
        turned: whether some values are rotated.
        alpha, keep: of the rule.
        window: whether some rule has a horizon.
        like: a pool, for its type.
    """

    table: Table
    tile: Tile
    kinds: tuple[tuple[int | bool, ...], ...]
    turned: bool
    alpha: float
    keep: float
    window: bool
    like: Tensor


def planned(stores: Stores, q: Tensor, k: Tensor) -> _Plan:
    """The plan of a layer, made once for queries like `q` and keys like `k`."""
    if "plan of triton" not in stores.known:
        stores.known["plan of triton"] = _planned(stores, q, q.shape[1] // k.shape[1])
    plan: _Plan = stores.known["plan of triton"]
    return plan


def _planned(stores: Stores, q: Tensor, group: int) -> _Plan:
    D, kinds = q.shape[-1], kinds_of(stores)
    formats = [f for pair in kinds for f in pair if f is not None]
    lookups = any(f.levels == "lloyd" and f.bits in (2, 3, 4, 5) for f in formats)
    tile = decode_tile(D, q.element_size(), lookups, ampere=ampere(q.device))
    table = made(stores, group, tile.columns, q.device)
    sums = [h.sums for h in stores.heads if h.sums is not None]
    found = []
    for key, value in kinds:
        fixed = constants(key, value, D, q.dtype)
        rotated = key is not None and key.rotate
        found.append((*(fixed[name] for name in ORDER), rotated))
    return _Plan(
        table, tile, tuple(found), any(v is not None and v.rotate for _, v in kinds),
        float(sums[0].alpha) if sums else 0.0, float(sums[0].keep) if sums else 1.0,
        any(s.horizon is not None for s in sums), stores.heads[0].parts[-1].keys,
    )  # type: ignore[arg-type] # fmt: skip


def forward(
    q: Tensor, k: Tensor, v: Tensor, stores: Stores, *, scale: float, softcap: float | None = None,
    room: Room | None = None,
) -> Tensor:  # fmt: skip
    """As `reference`."""
    from kvsearch_kernels.decode_step.triton_kernels import (
        attend_heads,
        combine_heads,
        count,
        enter,
    )

    (B, Hq, D), H = q.shape, k.shape[1]
    G = Hq // H
    for heads in stores.heads:
        pool = heads.parts[-1]
        check_lengths(heads.parts)
        check_room(pool.keys, pool.lengths, k)  # type: ignore[arg-type]
    plan = planned(stores, q, k)
    table, tile, last = plan.table, plan.tile, [x[-1] for x in plan.kinds]
    fp32 = partial(taken, room, dtype=torch.float32, device=q.device)
    out, lse = taken(room, "out", B, Hq, D, dtype=q.dtype, device=q.device), fp32("lse", B, Hq)
    if out.numel() == 0:
        return out
    programs, scores = table.programs.shape[0], table.voters.shape[0] > 0
    outs, bits = fp32("partial", programs, G, D), fp32("bits", programs, G)
    products = fp32("products", table.products * G) if scores else bits
    q, k, v = q.contiguous(), rows_last(k), rows_last(v)
    rotated = taken(room, "rotated", *q.shape, dtype=q.dtype, device=q.device) if any(last) else q
    spun = {"D": D, "HEAD": table.heads.shape[1], "STEPS": D.bit_length() - 1, "NORM": D**-0.5}
    with on(q.device):
        enter[(B * H, 1 + G * any(last))](
            q, k, v, rotated, plan.like, table.heads, *k.stride()[:2], *v.stride()[:2], H, G,
            **spun, num_warps=1,
        )  # fmt: skip
        attend_heads[(programs,)](
            q, rotated, plan.like, table.programs, outs, bits, products, levels_on(q.device),
            G, scale, softcap or 1.0,
            D=D, GP=max(tile.rows, 1 << (G - 1).bit_length()), BN=tile.columns,
            HAS_CAP=softcap is not None, SCORES=scores, ASM=not emulated(), KINDS=plan.kinds,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        combine_heads[(B * H, G)](
            outs, bits, out, lse, table.programs, table.heads, G, **spun,
            SP=1 << (table.programs_each - 1).bit_length(), ROTATED=plan.turned, num_warps=4,
        )  # fmt: skip
        if scores:
            count[(ceil_div(table.slots, RECEIVE_COLUMNS), table.voters.shape[0])](
                table.voters, table.heads, products, lse, G, plan.alpha, plan.keep,
                POWER={0.0: 0, 1.0: 1}.get(plan.alpha, 2), WINDOW=plan.window,
                DECAY=plan.keep != 1.0, HELD=table.held, HEAD=table.heads.shape[1],
                BN=RECEIVE_COLUMNS, num_warps=RECEIVE_WARPS,
            )  # fmt: skip
    return out
