"""Values of the tokens that a layer holds and of those that come, for a pass over many at once.

A token has its 16-bit value, and where the policy quantises, the value that its tier reads back.
What is in the tier already has only the latter. After the pass the store is left as the stream
would leave it: what it held and still holds moves as it is, and only new tokens are encoded.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvsearch.cache.gradients import straight
from kvsearch.cache.state import LayerState
from kvsearch.policy.schedule import Ints


@dataclass(frozen=True, eq=False)
class Versions:
    """Both values of each token, as rows of one table.

    Attributes:
        k, v: 16-bit values `[B, H, R, D]`, then quantised ones where there are such: `2 R` rows.
        row: of the 16-bit value of each token of the stream `[T]`; -1 where it is gone.
        count: rows of one value, `R`.
    """

    k: Tensor
    v: Tensor
    row: Ints
    count: int

    def take(self, tokens: Ints, quantised: Ints) -> tuple[Tensor, Tensor]:
        """Keys and values `[B, H, E, D]` of some tokens, each with or without its rounding."""
        which = torch.from_numpy(self.row[tokens] + self.count * quantised).to(self.k.device)
        return self.k.index_select(2, which), self.v.index_select(2, which)


def versions(state: LayerState, held: Ints, k: Tensor, v: Tensor) -> Versions:
    """Values of what `state` holds and of the tokens that come.

    Args:
        state: of a policy with one tier that decides by age.
        held: tokens in its slots `[N]`.
        k, v: those of the next tokens `[B, H, M, D]`, rounded to 16 bits.
    """
    seen, n, m = state.seen, len(held), k.shape[2]
    T = seen + m
    row = np.full(T, -1, dtype=np.int64)
    row[held], row[seen:] = np.arange(n), np.arange(n, n + m)
    if n:
        assert state.store.n == n, (state.store.n, n)
        k, v = (
            torch.cat([old, new], 2) for old, new in zip(state.store.read(), (k, v), strict=True)
        )
    if state.layer.policy.quantizes:
        kc, vc = state.codecs[0]
        group = kc.fmt.group if kc.fmt is not None and kc.along_tokens else 1
        first = untouched(state)
        # of an unfinished group no token is quantised before the end
        whole = first + (T - (seen - n + first)) // group * group
        keys, values = k.detach(), v.detach()
        low_k = [keys[:, :, :first], kc.fake(keys[:, :, first:whole]), keys[:, :, whole:]]
        low_v = [values[:, :, :first], vc.fake(values[:, :, first:])]
        k = torch.cat([k, straight(torch.cat(low_k, 2), k)], 2)
        v = torch.cat([v, straight(torch.cat(low_v, 2), v)], 2)
    return Versions(k, v, row, n + m)


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
    pools: NDArray[np.uint8],
    residual: int,
) -> None:
    """Let the store hold `held` after the new tokens, whatever it held before them.

    Args:
        state: as before the new tokens.
        k, v: of the new tokens `[B, H, M, D]`, in 16 bits.
        held: tokens in its slots after them, rising.
        row: where each token is among the slots before and the new tokens, see `Versions`.
        pools: of `held`.
        residual: the last so many have seen no compaction; all of them are new.
    """
    store, grouped = state.store, state.codecs[0][0].along_tokens
    in_tier = int((pools == 0).sum())
    group, sinks = state.layer.policy.quantizer.group or 1, state.layer.policy.fp16_sinks
    at = torch.from_numpy(pools).to(k.device)
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
    store.compact(torch.from_numpy(keep).to(k.device), at[: len(compacted)])
    if residual:
        store.append(*_some(k, v, rows[len(compacted) :] - n))


def _some(k: Tensor, v: Tensor, tokens: Ints) -> tuple[Tensor, Tensor]:
    index = torch.from_numpy(tokens).to(k.device)
    return k.index_select(2, index), v.index_select(2, index)
