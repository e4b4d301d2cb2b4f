"""Triton implementation of `decode_step`; importing it imports no Triton.

Three launches serve all heads of a layer. A fourth comes where their rule asks what slots received,
and one where keys carry no angle: it unpacks and turns them, into memory that all layers share.
Between two compactions nothing is made on the host: where everything lies is in a table on the
device (`table`).
"""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from kvsearch_kernels.configs import (
    RECEIVE_COLUMNS,
    RECEIVE_WARPS,
    REPACK_ROWS,
    Tile,
    repack_warps,
)
from kvsearch_kernels.decode_step.limits import why_not
from kvsearch_kernels.decode_step.reference import Stores, check_room
from kvsearch_kernels.decode_step.table import Table, kinds_of, made
from kvsearch_kernels.launch import (
    FUSED,
    ceil_div,
    emulated,
    on,
    rows_last,
)
from kvsearch_kernels.packed_attention.limits import turns_of
from kvsearch_kernels.packed_attention.reference import check_lengths, slots_of
from kvsearch_kernels.packed_attention.triton_args import constants, levels_on, tile_of
from kvsearch_kernels.quantize_kv.triton_impl import steps_of
from kvsearch_kernels.repack_kv.table import constants as as_repacked

__all__ = ["emulated", "forward", "why_not"]

ORDER = ("KB", "KG", "KL", "KF", "VB", "VG", "VL", "VF")  # of a kind's constants in the kernel


@dataclass(frozen=True)
class _Plan:
    """What a layer's launches take, from one description of it to the next.

    Attributes:
        table: where everything lies.
        tile: of the kernel that reads keys and values.
        kinds: constants of each pair of formats, and whether keys are rotated.
        turns: `steps_of` the rotation of keys, and of values; 0 where none are rotated.
        half: pairs of channels that are turned to a slot's index; 0 where keys have their angle.
        alpha, keep: of the rule.
        window: whether some rule has a horizon.
        like: of the type of the pools.
    """

    table: Table
    tile: Tile
    kinds: tuple[tuple[int | bool, ...], ...]
    turns: tuple[int, int]
    half: int
    alpha: float
    keep: float
    window: bool
    like: Tensor

    @cached_property
    def given(self) -> tuple[Hashable, ...]:
        """What launches are given of it; what lies in the table they find on the device."""
        lie = (self.table.programs, self.table.heads, self.table.voters, self.table.turns)
        numbers = ("kinds", "key_kinds", "held", "programs_each", "products", "slots", "slots_each")
        return (
            *((x.data_ptr(), x.shape) for x in lie),
            *(getattr(self.table, name) for name in numbers),
            self.tile, self.kinds, self.turns, self.half, self.alpha, self.keep, self.window,
            self.like.dtype,
        )  # fmt: skip


def given(stores: Stores) -> Hashable:
    """What launches for a token of `stores` are given, and for which; None before their plan."""
    known, plan = stores.known.get("plan of triton", (None, None))
    if plan is None or not plan.table.stands(stores):
        return None
    return known, plan.given


def planned(stores: Stores, q: Tensor, k: Tensor) -> _Plan:
    """The plan of a layer, made once for queries like `q` and keys like `k`.

    It is made anew if other stores have used the place of its table since.
    """
    asked = q.shape, q.dtype, k.shape
    known, plan = stores.known.get("plan of triton", (None, None))
    if plan is None or known != asked or not plan.table.stands(stores):
        plan = _planned(stores, q, q.shape[1] // k.shape[1])
        stores.known["plan of triton"] = asked, plan
    found: _Plan = plan
    return found


def _planned(stores: Stores, q: Tensor, group: int) -> _Plan:
    """The plan for `group` query heads a KV head."""
    D, kinds = q.shape[-1], kinds_of(stores)
    fixed = [constants(key, value, D, q.dtype) for key, value in kinds]
    tile = tile_of(fixed, D, q.element_size(), group)
    table = made(stores, group, tile, q.device)
    sums = [h.sums for h in stores.heads if h.sums is not None]
    found = []
    for (key, _), mine in zip(kinds, fixed, strict=True):  # turned keys are not rotated any more
        found.append((*(mine[name] for name in ORDER), steps_of(key, D) > 0))
    pool, like = stores.heads[0].parts[-1].keys, stores.kept.get("like")
    assert isinstance(pool, Tensor)
    if like is None or (like.dtype, like.device) != (pool.dtype, pool.device):
        like = stores.kept["like"] = torch.empty(1, dtype=pool.dtype, device=pool.device)
    turns = turns_of((p for h in stores.heads for p in h.parts if slots_of(p)), D)
    how = stores.heads[0].turned
    spun = 0 if how is not None else max(turns[0], default=0)
    return _Plan(
        table, tile, tuple(found), (spun, max(turns[1], default=0)),
        0 if how is None else how.inv_freq.shape[-1],
        float(sums[0].alpha) if sums else 0.0, float(sums[0].keep) if sums else 1.0,
        any(s.horizon is not None for s in sums), like,
    )  # fmt: skip


def forward(
    q: Tensor, k: Tensor, v: Tensor, stores: Stores, *, scale: float, softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """As `reference`."""
    from kvsearch_kernels.decode_step.triton_kernels import (
        attend_heads,
        combine_heads,
        count,
        enter,
        turn_heads,
    )

    (B, Hq, D), H = q.shape, k.shape[1]
    G = Hq // H
    for heads in stores.heads:
        pool = heads.parts[-1]
        check_lengths(heads.parts)
        check_room(pool.keys, pool.lengths, k)  # type: ignore[arg-type]
    plan = planned(stores, q, k)
    table, tile, last = plan.table, plan.tile, [x[-1] for x in plan.kinds]
    fp32 = partial(torch.empty, dtype=torch.float32, device=q.device)
    out, lse = torch.empty(B, Hq, D, dtype=q.dtype, device=q.device), fp32(B, Hq)
    if out.numel() == 0:
        return out
    programs, scores = table.programs.shape[0], table.voters.shape[0] > 0
    outs, bits = fp32(programs, G, D), fp32(programs, G)
    products = fp32(table.products * G) if scores else bits
    q, k, v = q.contiguous(), rows_last(k), rows_last(v)
    like_q = partial(torch.empty, dtype=q.dtype, device=q.device)
    rotated = like_q(*q.shape) if any(last) or plan.half else q
    turned = like_q(table.products, D) if plan.half else q
    wide, levels = {"D": D, "HEAD": table.heads.shape[1]}, levels_on(q.device)
    turns: dict[str, int] = {"HALF": plan.half, "COLUMNS": table.turns.shape[1]}
    with on(q.device):
        enter[(B * H, 1 + G * any(last))](
            q, k, v, rotated, plan.like, table.heads, table.turns, *k.stride()[:2],
            *v.stride()[:2], H, G, **wide, **turns, STEPS=plan.turns[0], **FUSED, num_warps=1,
        )  # fmt: skip
        if plan.half:
            turn_heads[(B * H, G + ceil_div(table.slots_each, REPACK_ROWS))](
                q, rotated, turned, plan.like, table.heads, table.turns, levels, G, **wide,
                **turns, HELD=table.held, BT=REPACK_ROWS,
                FORMATS=tuple(as_repacked(fmt, D) for fmt in table.key_kinds),
                **FUSED, num_warps=repack_warps(D, len(table.key_kinds)),
            )  # fmt: skip
            q = rotated
        attend_heads[(programs,)](
            q, rotated, plan.like, turned, table.programs, outs, bits, products, levels,
            G, scale, softcap or 1.0,
            D=D, GP=tile.rows, BN=tile.columns,
            HAS_CAP=softcap is not None, SCORES=scores, ASM=not emulated(),
            TURNS=plan.half > 0, KINDS=plan.kinds, STAGES=tile.stages,
            **FUSED, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        combine_heads[(B * H, G)](
            outs, bits, out, lse, table.programs, table.heads, G, **wide,
            SP=1 << (table.programs_each - 1).bit_length(), STEPS=plan.turns[1],
            **FUSED, num_warps=4,
        )  # fmt: skip
        if scores:
            count[(ceil_div(table.slots, RECEIVE_COLUMNS), table.voters.shape[0])](
                table.voters, table.heads, products, lse, G, plan.alpha, plan.keep,
                POWER={0.0: 0, 1.0: 1}.get(plan.alpha, 2), WINDOW=plan.window,
                DECAY=plan.keep != 1.0, HELD=table.held, HEAD=table.heads.shape[1],
                BN=RECEIVE_COLUMNS, **FUSED, num_warps=RECEIVE_WARPS,
            )  # fmt: skip
    return out
