"""Values of the tokens that a layer holds and of those that come, for a pass over many at once.

A token has its 16-bit value, and where the policy quantises, the value that its tier reads back.
What is in the tier already has only the latter. After the pass the store is left as the stream
would leave it: what it held and still holds moves as it is, and only new tokens are encoded.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvsearch.cache.slots.formats import straight
from kvsearch.cache.state import LayerState
from kvsearch.policy.schedule import Ints
from kvsearch_kernels.host_to_device import sent


@dataclass(frozen=True, eq=False)
class Versions:
    """Both values of each token, as rows of up to three tensors that follow each other.

    Attributes:
        parts: keys and values `[B, H, R, D]` of the slots as they are read back, of the new tokens
            in 16 bits, and quantised ones of those that are still in 16 bits.
        row: first row of each token of the stream `[T]`; -1 where it is gone.
        low: row of its quantised value `[T]`.
    """

    parts: tuple[tuple[Tensor, Tensor], ...]
    row: Ints
    low: Ints

    def rows(self, tokens: Ints, quantised: Ints) -> Ints:
        """Rows of some tokens, each with or without its rounding."""
        return np.where(quantised > 0, self.low[tokens], self.row[tokens])

    def ranges(self) -> Iterator[tuple[int, int, tuple[Tensor, Tensor]]]:
        """First row of each part, the row after its last one, and the part."""
        start = 0
        for part in self.parts:
            stop = start + part[0].shape[2]
            yield start, stop, part
            start = stop

    def take(self, rows: Ints) -> tuple[Tensor, Tensor]:
        """Keys and values `[B, H, E, D]` of some rows."""
        k, v = self.parts[0]
        if len(self.parts) == 1:
            first, stop = int(rows[0]), int(rows[-1]) + 1
            if stop - first == len(rows) and (rows == np.arange(first, stop)).all():
                return k[:, :, first:stop], v[:, :, first:stop]
            return _some(k, v, rows)
        taken = (
            k.new_empty(*k.shape[:2], len(rows), k.shape[3]),
            v.new_empty(*v.shape[:2], len(rows), v.shape[3]),
        )
        for start, stop, part in self.ranges():
            mine = np.flatnonzero((start <= rows) & (rows < stop))
            at = sent(mine, k.device)
            for whole, some in zip(taken, _some(*part, rows[mine] - start), strict=True):
                whole.index_copy_(2, at, some)
        return taken


def versions(state: LayerState, held: Ints, k: Tensor, v: Tensor) -> Versions:
    """Values of what `state` holds and of the tokens that come.

    Args:
        state: of a policy with one tier that decides by age.
        held: tokens in its slots `[N]`.
        k, v: those of the next tokens `[B, H, M, D]`, rounded to 16 bits.
    """
    seen, n, m = state.seen, len(held), k.shape[2]
    assert state.store.n == n, (state.store.n, n)
    T, parts = seen + m, [(k, v)]
    row = np.full(T, -1, dtype=np.int64)
    row[held], row[seen:] = np.arange(n), np.arange(n, n + m)
    low = row
    if n:
        parts.insert(0, state.store.read())
    if state.layer.policy.quantizes:
        kc, vc = state.codecs[0]
        group = kc.fmt.group if kc.fmt is not None and kc.along_tokens else 1
        first = untouched(state)
        fresh_k, fresh_v = k.detach(), v.detach()
        if n > first:
            fresh_k, fresh_v = (
                torch.cat([old[:, :, first:], x], 2)
                for old, x in zip(parts[0], (fresh_k, fresh_v), strict=True)
            )
        # of an unfinished group no token is quantised before the end
        whole = (T - (seen - n + first)) // group * group
        low_k = kc.read_back(fresh_k[:, :, :whole], state.impls)
        low_v = vc.read_back(fresh_v, state.impls)
        if whole < fresh_k.shape[2]:
            low_k = torch.cat([low_k, fresh_k[:, :, whole:]], 2)
        parts.append((low_k, low_v) if n else (straight(low_k, k), straight(low_v, v)))
        low = np.where(row >= first, row + n + m - first, row)
    return Versions(tuple(parts), row, low)


def untouched(state: LayerState) -> int:
    """First slot behind the tier: those from here on are in 16 bits, and may enter the tier."""
    compacted = state.store.n - state.store.residual
    sinks = min(state.layer.policy.fp16_sinks, compacted)
    return sinks + state.layer.tier_counts(compacted)[0]


def leave(
    state: LayerState,
    k: Tensor,
    v: Tensor,
    held: Ints,
    row: Ints,
    pools: tuple[NDArray[np.uint8], Tensor],
    residual: int,
) -> None:
    """Let the store hold `held` after the new tokens, whatever it held before them.

    Args:
        state: as before the new tokens.
        k, v: of the new tokens `[B, H, M, D]`, in 16 bits.
        held: tokens in its slots after them, rising.
        row: where each token is among the slots before and the new tokens, see `Versions`.
        pools: of `held`, on the host and where the tokens are.
        residual: the last so many have seen no compaction; all of them are new.
    """
    store, grouped = state.store, state.codecs[0][0].along_tokens
    in_tier, at = int((pools[0] == 0).sum()), pools[1]
    group, sinks = state.layer.policy.quantizer.group or 1, state.layer.policy.fp16_sinks
    if state.seen == 0 or (grouped and in_tier and row[held[sinks]] >= untouched(state)):
        # nothing that is held has been quantised before
        lead = -in_tier % group if grouped else 0  # gone, but they share the first scales
        if lead:
            before = np.arange(held[sinks] - lead, held[sinks])
            held = np.concatenate([held[:sinks], before, held[sinks:]])
        if state.seen:
            k, v = (torch.cat([old, x], 2) for old, x in zip(store.read(), (k, v), strict=True))
        store.load(*_some(k, v, row[held]), at, residual, lead)
        return
    rows, n = row[held], store.n
    compacted = rows[: len(rows) - residual]
    fresh = compacted[compacted >= n] - n
    if grouped:  # of these nothing has left the tier
        fresh = np.arange(len(fresh))
    keep = np.concatenate([compacted[compacted < n], n + np.arange(len(fresh))])
    if len(fresh):
        store.append(*_some(k, v, fresh))
    store.compact(sent(keep, k.device), at[: len(compacted)])
    if residual:
        store.append(*_some(k, v, rows[len(compacted) :] - n))


def _some(k: Tensor, v: Tensor, tokens: Ints) -> tuple[Tensor, Tensor]:
    if len(tokens) == k.shape[2] and (tokens == np.arange(len(tokens))).all():
        return k, v
    index = sent(tokens, k.device)
    return k.index_select(2, index), v.index_select(2, index)
