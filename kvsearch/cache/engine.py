"""How a layer takes in tokens: the same code prefills, decodes and evaluates.

`advance` takes any number of new tokens, and the result does not depend on how a stream is cut into
calls: that is what lets one forward pass over a text replay a cache that was filled token by token.
"""

from functools import partial

import torch
from torch import Tensor

from kvsearch.cache.by_age import lifetimes
from kvsearch.cache.eviction import loop as eviction
from kvsearch.cache.general import segments, staging
from kvsearch.cache.state import LayerState

PIECE = 192  # tokens of a whole layer that are scanned at once: copies beside the cache


def advance(
    state: LayerState,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    piece: int = PIECE,
    compacts: bool = True,
) -> Tensor:
    """Take in new tokens and attend from them.

    Args:
        state: the layer.
        q: queries `[B, Hq, M, D]`, rotated to their index in the stream.
        k: keys `[B, H, M, D]`, rotated likewise.
        v: values `[B, H, M, Dv]`.
        scale: factor on the dot products.
        softcap: bound of the scaled products, if the model has one.
        piece: tokens that a deployed layer scans at once.
        compacts: whether a compaction takes place where one is due; False, of one token, leaves
            it to the caller.

    Returns:
        Attention output `[B, Hq, M, Dv]`.
    """
    q, k, v = segments.arriving(state, q, k, v)
    if state.fast and q.shape[2] > 1 and lifetimes.serves(state, q.shape[2]):
        out = lifetimes.replay(state, q, k, v, scale=scale, softcap=softcap)
        state.note_peak()
        return out
    how = partial(_piecewise, scale=scale, softcap=softcap, compacts=compacts)
    if not staging.applies(state, k):
        return how(state, q, k, v)
    with staging.staged(state, k, v):
        piece = max(piece, 2 * state.layer.policy.interval)
        pieces = zip(*(x.split(piece, 2) for x in (q, k, v)), strict=True)
        return torch.cat([how(state, *x) for x in pieces], 2)


def _piecewise(
    state: LayerState, q: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: float | None,
    compacts: bool,
) -> Tensor:  # fmt: skip
    """From compaction to compaction, the fast ways where there are such."""
    if state.fast and eviction.serves(state, q.shape[2]):
        return eviction.run(state, q, k, v, scale=scale, softcap=softcap)
    return segments.run(state, q, k, v, scale=scale, softcap=softcap, compacts=compacts)
