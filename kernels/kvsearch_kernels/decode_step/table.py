"""Where the heads of a layer lie, as one table of 64-bit integers on the device.

It has four sections. Addresses are in bytes; those of keys and values are of the head's own rows.

    programs: a split of a part of a KV head each, those of a head one after the other
        0 formats, 1 KV head, 2 split, 3 of how many, 4 keys, 5 their scales, 6 values, 7 theirs,
        8 length, 9 first product, 10 slots of the head, 11 whether values are rotated, 12 tokens
        that the first group of keys lacks
    heads: a KV head of a batch row each
        0 first program, 1 programs, 2 keys of its pool, 3 values, 4 length, 5 capacity,
        6 first product, 7 slots; then first slot and length of each part, 0 and 0 of none
    voters: whoever adds up what slots receive
        0 sums, 1 order or 0, 2 slots, 3 first KV head, 4 how many, 5 slots of other parts than the
        pool, 6 length at the next compaction, 7 last tokens that count
    turns: a KV head of a batch row each, where keys carry no angle
        0 angle of one position, 1 index or 0, 2 slots of other parts than the pool, 3 positions
        dropped; then of each part 0 format of keys, 1 keys, 2 their scales, 3 first slot, 4 slots,
        as `repack_kv` has them

A head's query heads share its programs and slots; products `[G, slots]` of a head follow those of
the head before. Keys that carry no angle are unpacked and turned before they are attended to, and
lie like products: then a program's keys are counted from there, in numbers, and have no scales.
Heads with many slots get more programs than those with few, so that all take about equally long,
see `packed_attention/splits.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvsearch_kernels.addresses import Rows, rows_at
from kvsearch_kernels.configs import Tile
from kvsearch_kernels.decode_step.reference import Heads, Stores
from kvsearch_kernels.host_to_device import send
from kvsearch_kernels.launch import ceil_div
from kvsearch_kernels.packed_attention.reference import Part, slots_of
from kvsearch_kernels.packed_attention.splits import cost_of, splits
from kvsearch_kernels.packed_attention.triton_args import lengths_of, programs_at_once
from kvsearch_kernels.quantize_kv.reference import Format, Packed

PROGRAM, HEAD, VOTER = 13, 8, 8  # columns; those of a head without its parts
TURN, TURN_PART = 4, 5  # likewise, of `turns` without its parts, and of each of these
NEVER = 1 << 62  # a horizon that nothing reaches
Pair = tuple[Format | None, Format | None]  # of keys and values


@dataclass(frozen=True)
class Table:
    """A layer's table, and what launches take from the host.

    Attributes:
        rows: the whole of it, on the host.
        programs, heads, voters, turns: sections, on the device.
        kinds: formats as they are attended to, in the order of their numbers.
        key_kinds: formats of keys that are turned before, likewise.
        held: parts of a head, at most.
        programs_each: programs of a head, at most.
        products: of all heads, over query heads per KV head.
        slots: of a voter, at most.
        slots_each: slots of a head, at most.
    """

    rows: Rows
    programs: Tensor
    heads: Tensor
    voters: Tensor
    turns: Tensor
    kinds: tuple[Pair, ...]
    key_kinds: tuple[Format | None, ...]
    held: int
    programs_each: int
    products: int
    slots: int
    slots_each: int

    def stands(self, stores: Stores) -> bool:
        """Whether this is what is on the device now."""
        rows, _ = stores.kept.get("table", (None, None))
        return rows is self.rows


def sides_of(part: Part) -> list[Tensor]:
    """Keys, their scales, values and theirs `[B, H, N, w]`; those of 16 bits stand for scales."""
    sides: list[Tensor] = []
    for held in (part.keys, part.values):
        packed = isinstance(held, Packed)
        sides += [held.codes, held.scales.flatten(-2)] if packed else [held, held]  # type: ignore
    return sides


def kinds_of(stores: Stores) -> tuple[Pair, ...]:
    """The formats of a layer's parts, each once; kernels are compiled for these, in this order."""
    every = {_pair(p, h) for h in stores.heads for p in h.parts if slots_of(p)}
    return tuple(sorted(every, key=lambda pair: [_described(fmt) for fmt in pair]))


def _described(fmt: Format | None) -> tuple[int | str, ...]:
    if fmt is None:
        return ()
    return fmt.bits, fmt.group, fmt.levels, fmt.rotate, fmt.along, fmt.block or 0


def _pair(part: Part, heads: Heads) -> Pair:
    """Formats that the attention meets: keys that are turned before come in 16 or 32 bits."""
    return None if heads.turned is not None else part.key_format, part.value_format


def key_kinds_of(stores: Stores) -> tuple[Format | None, ...]:
    """The formats of keys that are turned before they are attended to, likewise."""
    turned = (h for h in stores.heads if h.turned is not None)
    every = {p.key_format for h in turned for p in h.parts if slots_of(p)}
    return tuple(sorted(every, key=_described))


def made(stores: Stores, group: int, tile: Tile, device: torch.device) -> Table:
    """The table of `stores`, for `group` query heads a KV head and such tiles of slots."""
    kinds, turned = kinds_of(stores), stores.heads[0].turned is not None
    parts = [[p for p in h.parts if slots_of(p)] for h in stores.heads]
    held = max(map(len, parts))
    lie = [_heads(mine, held) for mine in parts]
    counts = _splits(stores.heads, tile.columns, programs_at_once(tile, device))
    run = [
        _programs(h, mine, its, kinds)
        for h, mine, its in zip(stores.heads, parts, counts, strict=True)
    ]
    first = 0
    for mine, its in zip(lie, run, strict=True):
        H, n = its.shape[1:3]
        mine[..., 0], mine[..., 1], first = first + np.arange(H) * n, n, first + H * n
    heads = np.concatenate(lie, 1)  # of all stores, side by side
    B, H = heads.shape[:2]
    heads[..., 0] += np.arange(B)[:, None] * first
    slots = heads[..., 7].ravel()
    heads[..., 6] = ((slots.cumsum() - slots) * group).reshape(B, H)
    programs = np.concatenate([x.reshape(B, -1, PROGRAM) for x in run], 1)
    programs[..., 1] = np.repeat(np.arange(H), heads[0, :, 1])
    ahead = np.take_along_axis(heads[..., 6], programs[..., 1], 1)  # products
    if turned:
        D = stores.heads[0].parts[-1].keys.shape[-1]  # type: ignore[union-attr]
        programs[..., 4] = programs[..., 5] = (ahead // group + programs[..., 9]) * D
    programs[..., 9] += ahead
    programs[..., 1] += np.arange(B)[:, None] * H
    voters = _voters(stores.heads, B, H)
    key_kinds = key_kinds_of(stores)
    turns = [_turns(h, x, held, key_kinds) for h, x in zip(stores.heads, parts, strict=True)]
    every = (programs, heads, voters, np.concatenate(turns, 1))
    sections = [x.reshape(-1, x.shape[-1]) for x in every]
    most, total = int(heads[..., 1].max()), int(slots.sum())
    one, two, three, four = placed(stores.kept, sections, device)
    rows, _ = stores.kept["table"]
    return Table(
        rows, one, two, three, four, kinds, key_kinds, held, most, total,
        int(voters[:, 2].max(initial=0)), int(slots.max()),
    )  # fmt: skip


def _splits(heads: Sequence[Heads], columns: int, room: int) -> list[list[int]]:
    """Programs of each part of heads, where the GPU runs `room` at once."""
    every = [(mine, p) for mine in heads for p in mine.parts if slots_of(p)]
    counts = iter(
        splits(
            tuple(cost_of(slots_of(p), _pair(p, mine)) for mine, p in every),
            tuple(ceil_div(slots_of(p), columns) for _, p in every),
            tuple(h.parts[-1].keys.shape[:2].numel() for h, _ in every),  # type: ignore[union-attr]
            room,
        )
    )
    return [[next(counts) for p in mine.parts if slots_of(p)] for mine in heads]


def _programs(
    heads: Heads, parts: Sequence[Part], splits: Sequence[int], kinds: Sequence[Pair]
) -> Rows:
    """Rows `[B, H, programs, columns]` of a store; which head, and its first product, is open."""
    found, start = [], 0
    for part, count in zip(parts, splits, strict=True):
        sides = [rows_at(x) for x in (*sides_of(part), lengths_of(part))]
        rows = np.zeros((*sides[0].shape, count, PROGRAM), np.int64)
        rows[..., 0] = kinds.index(_pair(part, heads))
        rows[..., 2], rows[..., 3] = np.arange(count), count
        rows[..., 4:9] = np.stack(sides, -1)[:, :, None]
        rows[..., 9], rows[..., 10] = start, sum(slots_of(p) for p in parts)
        rows[..., 11] = part.value_format is not None and part.value_format.rotate
        rows[..., 12] = part.keys.lead if isinstance(part.keys, Packed) else 0
        found.append(rows)
        start += slots_of(part)
    return np.concatenate(found, 2)


def _heads(parts: Sequence[Part], held: int) -> Rows:
    """Rows `[B, H, columns]` of a store; where programs and products start is open."""
    pool = parts[-1]
    assert isinstance(pool.keys, Tensor) and isinstance(pool.values, Tensor)
    lengths = [rows_at(lengths_of(p)) for p in parts]
    rows = np.zeros((*lengths[0].shape, HEAD + 2 * held), np.int64)
    rows[..., 2], rows[..., 3] = rows_at(pool.keys), rows_at(pool.values)
    rows[..., 4], rows[..., 5] = lengths[-1], pool.keys.shape[2]
    for i, (part, at) in enumerate(zip(parts, lengths, strict=True)):
        rows[..., HEAD + 2 * i], rows[..., HEAD + 2 * i + 1] = rows[..., 7], at
        rows[..., 7] += slots_of(part)
    return rows


def _voters(heads: Sequence[Heads], batch: int, every: int) -> Rows:
    """Rows `[voters, columns]` of all stores whose rule adds up what slots receive."""
    found, first = [np.zeros((0, VOTER), np.int64)], 0
    for mine in heads:
        count, sums = mine.parts[-1].keys.shape[1], mine.sums  # type: ignore[union-attr]
        if sums is not None:
            V = sums.sums.shape[1]
            rows = np.zeros((batch, V, VOTER), np.int64)
            rows[..., 0] = rows_at(sums.sums)
            if sums.order is not None:
                rows[..., 1] = rows_at(sums.order.expand(batch, V, -1))
            rows[..., 2], rows[..., 4] = sums.sums.shape[2], count // V
            rows[..., 3] = np.arange(batch)[:, None] * every + first + np.arange(V) * (count // V)
            rows[..., 5], rows[..., 6] = sums.held, sums.end
            rows[..., 7] = NEVER if sums.horizon is None else sums.horizon
            found.append(rows.reshape(-1, VOTER))
        first += count
    return np.concatenate(found)


def _turns(heads: Heads, parts: Sequence[Part], held: int, kinds: Sequence[Format | None]) -> Rows:
    """Rows `[B, H, columns]` of a store whose keys carry no angle, none of others."""
    B, H = parts[-1].keys.shape[:2]  # type: ignore[union-attr]
    how = heads.turned
    if how is None:
        return np.zeros((B, 0, TURN + held * TURN_PART), np.int64)
    rows = np.zeros((B, H, TURN + held * TURN_PART), np.int64)
    rows[..., 0] = rows_at(how.inv_freq.expand(B, H, -1))
    if how.index is not None:
        rows[..., 1] = rows_at(how.index.expand(B, H, -1))
    rows[..., 2], rows[..., 3], first = how.held, how.dropped, 0
    for i in range(held):
        part = parts[
            min(i, len(parts) - 1)
        ]  # the last again, without slots, where there is no i-th
        n = slots_of(part) if i < len(parts) else 0
        mine = rows[..., TURN + i * TURN_PART :]
        mine[..., 0], mine[..., 3], mine[..., 4] = kinds.index(part.key_format), first, n
        mine[..., 1], mine[..., 2] = map(rows_at, sides_of(part)[:2])
        first += n
    return rows


def placed(kept: dict[str, Any], sections: Sequence[Rows], device: torch.device) -> list[Tensor]:
    """Sections on the device: where those of the layer lay before, if they are as long.

    Nothing waits. What did not change is not copied, so that a cache which is full, and repeats
    its addresses at every compaction, can go on with the same captured launches. Each section
    begins at a multiple of 16 bytes: what Triton compiles for an address depends on that.
    """
    starts = list(accumulate((x.size + x.size % 2 for x in sections), initial=0))
    rows = np.zeros(starts.pop(), np.int64)
    for start, x in zip(starts, sections, strict=True):
        rows[start : start + x.size] = x.ravel()
    before, at = kept.get("table", (None, None))
    if before is None or before.shape != rows.shape or at.device != device:
        at = torch.empty(rows.shape, dtype=torch.int64, device=device)
    if before is None or not np.array_equal(before, rows):
        kept["table"] = rows, send(rows, at)
    return [at[i : i + x.size].view(x.shape) for i, x in zip(starts, sections, strict=True)]
