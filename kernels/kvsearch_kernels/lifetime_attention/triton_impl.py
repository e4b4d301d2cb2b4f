"""Triton implementation of `lifetime_attention`; importing it imports no Triton."""

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.weak import WeakIdKeyDictionary

from kvsearch_kernels.configs import attend_tile
from kvsearch_kernels.launch import (
    FUSED,
    INT32_MAX,
    ampere,
    ceil_div,
    emulated,
    int32,
    on,
    rows_last,
    why_not_heads,
    why_not_here,
)
from kvsearch_kernels.lifetime_attention.reference import isolated_rows

__all__ = ["emulated", "forward", "why_not"]


def why_not(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    birth: Tensor,
    death: Tensor,
    *,
    first_query: int,
    scale: float,
    softcap: float | None = None,
    anchors: Tensor | None = None,
) -> str | None:
    """Reason why these arguments cannot be taken, or None."""
    more = [] if anchors is None else [anchors]
    if reason := why_not_here(q, k, v, birth, death, *more) or why_not_heads(q, k, v):
        return reason
    if anchors is not None and (anchors.shape != birth.shape or anchors.is_floating_point()):
        return (
            f"anchors must be integers of shape {tuple(birth.shape)}, "
            f"got {tuple(anchors.shape)} of {anchors.dtype}"
        )
    return why_not_lives(birth, death, k.shape[2], first_query, q.shape[2], scale, softcap)


def why_not_lives(
    birth: Tensor,
    death: Tensor,
    entries: int,
    first_query: int,
    rows: int,
    scale: float,
    softcap: float | None,
) -> str | None:
    """Reason why lives `[E]` or the numbers of an attention cannot be taken, or None."""
    for name, x in (("birth", birth), ("death", death)):
        if x.shape != (entries,):
            return f"{name} must have shape ({entries},), got {tuple(x.shape)}"
        if x.is_floating_point():
            return f"{name} must be an integer tensor, got {x.dtype}"
    if not 0 <= first_query < INT32_MAX - rows - 1024 or entries > INT32_MAX - 1024:
        return f"token indices must fit in 31 bits, got first_query={first_query}, {entries} keys"
    if not scale > 0:
        return f"scale must be above 0, got {scale}"
    if softcap is not None and not softcap > 0:
        return f"softcap must be above 0, got {softcap}"
    return None


def plan(
    birth: Tensor,
    death: Tensor,
    *,
    first_query: int,
    rows: int,
    tile: tuple[int, int],
    anchors: Tensor | None = None,
    alone: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Key blocks that each query block has to visit.

    Args:
        birth: first query that sees each key, `[E]` int32.
        death: first query that no longer sees it, `[E]` int32.
        first_query: token index of the first query.
        rows: number of queries.
        tile: queries of a query block and keys of a key block.
        anchors: as the op takes them, int32; with `alone`, the rows that are anchors, `[M]`.

    Returns:
        Block lists `[queries / tile, keys / tile]` int32, of which the first `counts[:, 0]` are
        seen whole by every row of the query block, those up to `counts[:, 1]` in part, and the
        rest not at all; and `counts` `[queries / tile, 2]` int32.
    """
    bm, bn = tile
    blocks = ceil_div(birth.numel(), bn)
    short = (0, blocks * bn - birth.numel())
    born = pad(birth, short, value=INT32_MAX).view(blocks, bn)  # so a cut block is never whole
    dies = pad(death, short, value=-INT32_MAX).view(blocks, bn)
    low = torch.arange(0, rows, bm, device=birth.device).unsqueeze(-1) + first_query
    high = (low + bm - 1).clamp_max(first_query + rows - 1)
    alive = (born.amin(-1) <= high) & (dies.amax(-1) > low)
    whole = (born.amax(-1) <= low) & (dies.amin(-1) > high)
    if anchors is not None and alone is not None:
        hidden = (pad(anchors, short, value=-1).view(blocks, bn) >= 0).any(-1)
        short = (0, low.shape[0] * bm - rows)
        whole &= ~(hidden & pad(alone, short).view(-1, bm).any(-1, keepdim=True))
    kind = torch.where(alive, torch.where(whole, 0, 1), 2).to(torch.uint8)
    table = kind.argsort(dim=-1, stable=True).to(torch.int32)
    counts = torch.stack([(kind == 0).sum(-1), (kind < 2).sum(-1)], -1).to(torch.int32)
    return table, counts


Prepared = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor, Tensor]
_prepared_before: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _prepared(
    birth: Tensor, death: Tensor, anchors: Tensor | None, first_query: int, rows: int,
    tile: tuple[int, int],
) -> Prepared:  # fmt: skip
    """Lives, anchors and rows that are such in int32, and the `plan`.

    They are made once for the same tensors with the same content: all layers of a policy by age
    share their lives, and then a layer costs one launch.
    """
    given = [x for x in (birth, death, anchors) if x is not None]
    known: dict[object, tuple[list[Tensor], Prepared]] = _prepared_before.setdefault(birth, {})
    key = (*((id(x), _content(x)) for x in given), first_query, rows, tile)
    if key in known:
        return known[key][1]
    born, dies = int32(birth), int32(death)
    lonely, alone = None if anchors is None else int32(anchors), None
    if lonely is not None:
        alone = isolated_rows(lonely, first_query, rows)
    table, counts = plan(
        born, dies, first_query=first_query, rows=rows, tile=tile, anchors=lonely, alone=alone
    )
    made = born, dies, lonely, None if alone is None else alone.int(), table, counts
    while len(known) > 15:
        known.pop(next(iter(known)))
    known[key] = given[1:], made  # held, so that no other tensor gets their number
    return made


def _content(x: Tensor) -> int:
    """Which content of a tensor this is. Of those made in inference mode nobody counts it: lives
    are never written to.
    """
    return 0 if x.is_inference() else x._version


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    birth: Tensor,
    death: Tensor,
    *,
    first_query: int,
    scale: float,
    softcap: float | None = None,
    anchors: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `reference`."""
    from kvsearch_kernels.lifetime_attention.triton_kernels import attend

    B, Hq, M, D = q.shape
    H, E, DV = k.shape[1], k.shape[2], v.shape[-1]
    out = torch.empty(B, Hq, M, DV, dtype=q.dtype, device=q.device)
    lse = torch.empty(B, Hq, M, dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out, lse
    if E == 0:
        return out.zero_(), lse.fill_(float("-inf"))
    q, k, v = rows_last(q), rows_last(k), rows_last(v)
    capped = softcap is not None
    tile = attend_tile(max(D, DV), q.element_size(), capped, ampere=ampere(q.device))
    birth, death, anchors, alone, table, counts = _prepared(
        birth, death, anchors, first_query, M, (tile.rows, tile.columns)
    )
    with on(q.device):
        attend[(table.shape[0], B * Hq)](
            q, k, v, birth, death, birth if anchors is None else anchors,
            birth if alone is None else alone, table, counts, out, lse,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
            M, E, first_query, Hq, Hq // H, table.shape[1], scale, softcap or 1.0,
            D=D, DV=DV, BM=tile.rows, BN=tile.columns, HAS_CAP=capped,
            ISOLATE=anchors is not None, **FUSED, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return out, lse
