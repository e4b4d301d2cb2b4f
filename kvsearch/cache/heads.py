"""KV heads of one layer that differ in slots or tiers: those that are alike share a state.

Nothing is padded to the longest head: each kind of head has its own store, and attends alone.
"""

from collections.abc import Sequence

from torch import Tensor

from kvsearch.cache import engine, rereading
from kvsearch.cache.decoding import steps
from kvsearch.cache.general import adakv, segments
from kvsearch.cache.state import LayerState
from kvsearch.errors import ModelError


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
        return engine.advance(states[0], q, k, v, scale=scale, softcap=softcap)
    if states[0].layer.policy.budgets.kind == "adakv":
        return adakv.run(states, q, k, v, scale=scale, softcap=softcap)
    every, group = k.shape[1], q.shape[1] // k.shape[1]
    out, one = q.new_empty(*q.shape[:3], v.shape[3]), q.shape[2] == 1
    for state in states:
        heads = state.layer.heads
        mine = slice(heads.start, heads.stop)
        queries = slice(heads.start * group, heads.stop * group)
        out[:, queries] = engine.advance(
            state, q[:, queries], k[:, mine], v[:, mine], scale=scale, softcap=softcap,
            piece=engine.PIECE * every // len(heads),  # copies of one kind of heads at a time
            compacts=not one,
        )  # fmt: skip
    if one:  # all kinds of heads together
        segments.finish(states)
    return out
