"""One new token over the packed slots, which are read as they are: the deployed step."""

import torch
from torch import Tensor

from kvsearch.cache.packed import PackedStore
from kvsearch.cache.state import LayerState
from kvsearch.rules import Segment, Votes
from kvsearch_kernels.decode_attention import decode_attention
from kvsearch_kernels.scored_decode import scored_decode


def decode(
    state: LayerState, q: Tensor, due: int | None, *, scale: float, softcap: float | None
) -> tuple[Tensor, Segment]:
    """Attend from the newest token, which the store already holds.

    Args:
        state: a packed layer.
        q: query `[B, Hq, 1, D]`; without its rotation when the policy re-indexes.
        due: the next compaction, in tokens seen.
        scale: factor on the dot products.
        softcap: bound of the scaled products, if the model has one.

    Returns:
        Attention output `[B, Hq, 1, D]`, and what the rule may observe, with what every slot
        received if the rule asks for it.
    """
    store, rotary = state.store, state.rotary if state.reindex else None
    assert isinstance(store, PackedStore)
    if rotary is not None:  # counts are filled in on the device: a copy from the host would wait
        q = rotary.turn(q, torch.full((1,), store.n - 1, device=q.device))
    parts, query = store.parts(q.dtype, rotary), q.squeeze(2)
    more = {"scale": scale, "softcap": softcap, "room": state.room}
    if state.rule is None or "attention" not in state.rule.needs:
        out, _ = decode_attention.record(state.impls, query, parts, **more)  # type: ignore[arg-type]
        return out.unsqueeze(2), Segment(state.seen, 1)
    assert state.scorer is not None
    out, received = scored_decode.record(state.impls, query, parts, **more)  # type: ignore[arg-type]
    left = 0 if due is None else due - state.seen - 1
    if store.native_pool is not None and store.fixed and rotary is None:
        pool, held = store.native_pool, store.n - store.native_pool.used
        found = Votes(
            received, store.order(), pool.lengths, held, pool.used + left, store.n, state.impls
        )
        if state.scorer.tally(state.seen, found):
            return out.unsqueeze(2), Segment(state.seen, 1, taken=True)
    visible, rows = (
        torch.full((1,), store.n, device="cpu"),
        torch.full((1,), left, device="cpu"),
    )  # on the host: no launch
    weight = float(state.scorer.row_weights(visible, rows))
    received = store.in_time(received) * weight  # a tensor of its own, also where there is a room
    return out.unsqueeze(2), Segment(state.seen, 1, received)
