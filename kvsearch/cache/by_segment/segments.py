"""Taking in tokens from one compaction to the next, in all groups of heads; serves every policy."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kvsearch.cache.by_segment import dense_staging
from kvsearch.cache.by_segment.eviction import finish
from kvsearch.cache.call import Call
from kvsearch.cache.head_group import HeadGroup
from kvsearch.cache.layer import Layer
from kvsearch.rules import Segment
from kvsearch_kernels.host_to_device import sent
from kvsearch_kernels.lifetime_attention import lifetime_attention
from kvsearch_kernels.scored_attention import scored_attention

ROWS = 512  # queries per attention map, so that a long prompt needs no T x T memory


def serves(layer: Layer, call: Call) -> bool:
    """Every layer, and any number of tokens."""
    return True


def run(layer: Layer, call: Call) -> Tensor:
    """Take in tokens in all heads, which are compacted together."""
    arrived = [(group, group.arriving(call.heads(group.heads))) for group in layer.groups]
    with ExitStack() as dense:
        for group, mine in arrived:
            if dense_staging.applies(layer, group, mine):
                dense.enter_context(dense_staging.staged(layer, group, mine))
        out = take_in(layer, arrived)
    layer.seen = call.end
    return out


def take_in(layer: Layer, arrived: Sequence[tuple[HeadGroup, Call]]) -> Tensor:
    """Attend from tokens that have arrived, and compact wherever that is due.

    Args:
        layer: of the groups.
        arrived: groups of its heads, in order, and what the call brings to each.
    """
    groups, whole = [group for group, _ in arrived], arrived[0][1]
    found, seen = list[Tensor](), whole.seen
    while seen < whole.end:
        due = layer.next_compaction(seen)
        stop = min(whole.end, seen + ROWS) if due is None else min(whole.end, seen + ROWS, due)
        if layer.policy.anchors is not None:
            stop = seen + layer.take_ahead(seen, stop - seen)
        now = slice(seen - whole.seen, stop - whole.seen)
        outs = list[Tensor]()
        for group, call in arrived:
            part = call.tokens(now)
            group.store.append(part.k, part.v)
            outs.append(_attend(group, part, due))
        found.append(outs[0] if len(outs) == 1 else torch.cat(outs, 1))
        seen = stop
        layer.note_peak(seen, groups)
        finish(layer, seen, groups)
    return found[0] if len(found) == 1 else torch.cat(found, 2)


def _attend(group: HeadGroup, call: Call, due: int | None) -> Tensor:
    """Attend from the newest tokens, which the store already holds, and let the rule observe."""
    out, found = _attend_dense(group, call, due)
    if group.scorer is not None:
        if "queries" in group.needs:
            queries = group.unscaled(call.q)
            queries = queries if group.reindex else group.unturned(call.seen, queries)[0]
            found = replace(found, queries=queries)
        group.scorer.observe(replace(found, predicted=call.predicted))
    return out


def _attend_dense(group: HeadGroup, call: Call, due: int | None) -> tuple[Tensor, Segment]:
    """Output over slots as they are read back, and what the rule may observe."""
    keys, values = group.read()
    n, m = keys.shape[2], call.count
    q = group.turned(call.q, n - m)
    seen, hidden = None, () if group.sequences is None else group.sequences.hidden()
    if len(hidden):
        seen = sent(np.setdiff1d(np.arange(n), hidden), q.device)
        keys, values, n = keys.index_select(2, seen), values.index_select(2, seen), len(seen)
    if "attention" not in group.needs:
        born = torch.zeros(n, dtype=torch.long, device=q.device)
        if m > 1:
            born = torch.arange(m - n, m, device=q.device).clamp_min_(0)
        never = torch.full_like(born, m)
        out, _ = lifetime_attention.record(
            group.impls, q, keys, values, born, never, first_query=0, **call.how
        )
        return out, Segment(call.seen, m)
    assert group.scorer is not None
    after = 0 if due is None else due - call.end
    weights = _row_weights(group, n, m, after, q.device)
    out, received = scored_attention.record(group.impls, q, keys, values, weights, **call.how)
    rows = None
    if "rows" in group.needs:
        many = group.scorer.watched(m, after)
        rows = attention_rows(q[:, :, m - many :], keys, **call.how)
    if seen is not None:
        received = _spread(received, seen, group.store.n)
        rows = None if rows is None else _spread(rows, seen, group.store.n)
    return out, Segment(call.seen, m, received, rows=rows)


def _spread(x: Tensor, slots: Tensor, n: int) -> Tensor:
    """What the `slots` `[N']` have of `x` `[..., N']`, with 0 for the others of `n`."""
    return x.new_zeros(*x.shape[:-1], n).index_copy(-1, slots, x)


def attention_rows(q: Tensor, keys: Tensor, *, scale: float, softcap: float | None) -> Tensor:
    """What the newest tokens give to every slot, `[B, H, G, M, N]` fp32 (fp64 of fp64).

    Args:
        q: their queries `[B, Hq, M, D]`.
        keys: of all slots `[B, H, N, D]`, the last `M` are the queries' own.
        scale: factor on the dot products.
        softcap: bound of the scaled products, if the model has one.
    """
    H, N, M = keys.shape[1], keys.shape[2], q.shape[2]
    kind = torch.promote_types(q.dtype, torch.float32)
    s = (q.to(kind) * scale).unflatten(1, (H, -1)) @ keys.to(kind).transpose(-1, -2).unsqueeze(2)
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    future = torch.ones(M, M, dtype=torch.bool, device=q.device).triu(1)
    s[..., N - M :].masked_fill_(future, float("-inf"))
    return s.softmax(-1)


def _row_weights(group: HeadGroup, n: int, m: int, after: int, device: torch.device) -> Tensor:
    """Weights of the newest `m` of `n` tokens, `after` tokens before the next compaction.

    Kept, because a full cache meets the same numbers at every compaction, and all layers do.
    """
    assert group.scorer is not None
    interval, inference = group.layout.policy.interval, torch.is_inference_mode_enabled()
    key = group.rule, interval, n, m, after, device, inference
    if key not in _weights:
        if len(_weights) > 256:
            _weights.clear()
        rows = torch.arange(m, device=device)
        _weights[key] = group.scorer.row_weights(n - m + rows + 1, m + after - 1 - rows)
    return _weights[key]


_weights: dict[tuple[object, ...], Tensor] = {}
