"""How a layer takes in tokens: the same code prefills, decodes and evaluates.

A call brings any number of new tokens, and the result does not depend on how a stream is cut into
calls: that is what lets one forward pass over a text replay a cache that was filled token by token.
KV heads of a layer that are alike in slots and tiers share a state, which attends alone.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from kvsearch.cache import eviction, rereading
from kvsearch.cache.by_age import lifetimes
from kvsearch.cache.decoding import steps
from kvsearch.cache.general import adakv, segments, staging
from kvsearch.cache.state import LayerState
from kvsearch.errors import ModelError

PIECE = 192  # tokens of a whole layer that are scanned at once: copies beside the cache


def advance(
    states: Sequence[LayerState],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """Take in new tokens in all heads of a layer and attend from them.

    Args:
        states: of the layer's heads, each KV head in one of them.
        q: queries `[B, Hq, M, D]`, rotated to their index in the stream.
        k: keys `[B, H, M, D]`, rotated likewise.
        v: values `[B, H, M, Dv]`.
        scale: factor on the dot products.
        softcap: bound of the scaled products, if the model has one.

    Returns:
        Attention output `[B, Hq, M, Dv]`.
    """
    for state in states:
        state.enter()
    if states[0].reading is not None:
        return rereading.attend(states, q, k, v, scale=scale, softcap=softcap)
    if states[0].rereads and states[0].seen:
        raise ModelError(
            "the prompt in this cache was not read again, as its policy's rule asks; call the "
            "cache's reset(), and then the model itself, as in model(ids, past_key_values=cache)"
        )
    if q.shape[2] == 1:
        found = steps.advance(states, q, k, v, scale=scale, softcap=softcap)
        if found is not None:
            return found
    else:
        steps.forget(states)
    if len(states) == 1:
        return alike(states[0], q, k, v, scale=scale, softcap=softcap)
    if states[0].layer.policy.budgets.kind == "adakv":
        return adakv.run(states, q, k, v, scale=scale, softcap=softcap)
    every, group = k.shape[1], q.shape[1] // k.shape[1]
    out, one = q.new_empty(*q.shape[:3], v.shape[3]), q.shape[2] == 1
    for state in states:
        heads = state.layer.heads
        mine = slice(heads.start, heads.stop)
        queries = slice(heads.start * group, heads.stop * group)
        out[:, queries] = alike(
            state, q[:, queries], k[:, mine], v[:, mine], scale=scale, softcap=softcap,
            piece=PIECE * every // len(heads),  # copies of one kind of heads at a time
            compacts=not one,
        )  # fmt: skip
    if one:  # all kinds of heads together
        segments.finish(states)
    return out


def alike(
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
    """`advance` in heads that share a state.

    Args:
        state: of the heads.
        q, k, v: as in `advance`, of these heads.
        scale, softcap: likewise.
        piece: tokens that a deployed layer scans at once.
        compacts: whether a compaction takes place where one is due; False, of one token, leaves
            it to the caller.
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
