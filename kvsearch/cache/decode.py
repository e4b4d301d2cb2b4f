"""One new token over the packed slots, which are read as they are: `LayerState`'s deployed path."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvsearch.cache.packed import PackedStore
from kvsearch_kernels.decode_attention import decode_attention
from kvsearch_kernels.scored_decode import scored_decode

if TYPE_CHECKING:
    from kvsearch.cache.state import LayerState


def decode(
    state: "LayerState", q: Tensor, end: int | None, *, scale: float, softcap: float | None
) -> Tensor:
    """Attend from the newest token, which the store already holds, and note scores.

    Args:
        state: a packed layer.
        q: query `[B, Hq, 1, D]`; without its rotation when the policy re-indexes.
        end: the next compaction, in tokens seen.
        scale: factor on the dot products.
        softcap: bound of the scaled products, if the model has one.

    Returns:
        Attention output `[B, Hq, 1, D]`.
    """
    store, rotary = state.store, state.rotary if state.reindex else None
    assert isinstance(store, PackedStore)
    n = torch.tensor([store.n], device=q.device)
    if rotary is not None:
        q = rotary.turn(q, n - 1)
    parts, query = store.parts(q.dtype, rotary), q.squeeze(2)
    if state.book is None:
        out, _ = decode_attention.record(state.impls, query, parts, scale=scale, softcap=softcap)
        return out.unsqueeze(2)
    out, received = scored_decode.record(state.impls, query, parts, scale=scale, softcap=softcap)
    left = 0 if end is None else end - state.seen - 1
    weight = state.book.row_weights(n, torch.full_like(n, left))
    state.book.add(store.in_time(received) * weight, state.seen, 1)
    return out.unsqueeze(2)
