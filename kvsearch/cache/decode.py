"""One new token over the packed slots, which are read as they are: the deployed step."""

import torch
from torch import Tensor

from kvsearch.cache.packed import PackedStore
from kvsearch.cache.state import LayerState
from kvsearch_kernels.decode_attention import decode_attention
from kvsearch_kernels.scored_decode import scored_decode


def decode(
    state: LayerState, q: Tensor, due: int | None, *, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor | None]:
    """Attend from the newest token, which the store already holds.

    Args:
        state: a packed layer.
        q: query `[B, Hq, 1, D]`; without its rotation when the policy re-indexes.
        due: the next compaction, in tokens seen.
        scale: factor on the dot products.
        softcap: bound of the scaled products, if the model has one.

    Returns:
        Attention output `[B, Hq, 1, D]`, and what every slot received, weighted by the rule's
        `row_weights`, `[B, H, N]` in order of time; None where the rule does not ask for it.
    """
    store, rotary = state.store, state.rotary if state.reindex else None
    assert isinstance(store, PackedStore)
    if rotary is not None:  # counts are filled in on the device: a copy from the host would wait
        q = rotary.turn(q, torch.full((1,), store.n - 1, device=q.device))
    parts, query = store.parts(q.dtype, rotary), q.squeeze(2)
    if state.rule is None or "attention" not in state.rule.needs:
        out, _ = decode_attention.record(state.impls, query, parts, scale=scale, softcap=softcap)
        return out.unsqueeze(2), None
    assert state.scorer is not None
    out, received = scored_decode.record(state.impls, query, parts, scale=scale, softcap=softcap)
    visible = torch.full((1,), store.n)  # on the host: one number, and no launch for it
    left = torch.full((1,), 0 if due is None else due - state.seen - 1)
    weight = float(state.scorer.row_weights(visible, left))
    received = store.in_time(received)
    return out.unsqueeze(2), received if weight == 1 else received * weight
