"""Taking in tokens piece by piece, from one compaction to the next; serves every policy."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kvsearch.cache.by_segment.compaction import Decision, carry_out, decide, settled
from kvsearch.cache.head_group import Call, LayerState
from kvsearch.cache.slots.formats import straight
from kvsearch.rules import Segment
from kvsearch_kernels.choose_slots import best_between
from kvsearch_kernels.host_to_device import sent
from kvsearch_kernels.lifetime_attention import lifetime_attention
from kvsearch_kernels.scored_attention import scored_attention

ROWS = 512  # queries per attention map, so that a long prompt needs no T x T memory


def run(state: LayerState, call: Call, *, compacts: bool = True) -> Tensor:
    """Take in tokens that have arrived; compact where that is due, unless a caller does it."""
    out: list[Tensor] = []
    done, total = 0, call.count
    while done < total:
        due = state.layer.clock.after(state.seen, state.prompt)
        left = total - done if due is None else min(due - state.seen, total - done)
        if state.sequences is not None:
            left = take_ahead(state, min(left, ROWS))
        part = call.tokens(slice(done, done + min(left, ROWS)))
        state.store.append(part.k, part.v)
        out.append(_attend(state, part, due))
        done += part.count
        state.seen += part.count
        state.note_peak()
        if compacts:
            finish([state])
    return out[0] if len(out) == 1 else torch.cat(out, 2)


def arriving(state: LayerState, call: Call) -> Call:
    """A call as a cache takes it in: rounded, and turned back if positions are re-indexed."""
    if state.seen == 0:
        state.begin(call)
    q, k, v = call.q, call.k, call.v
    if state.reindex:
        q, k = state.unturned(q, k)
    k, v = (straight(x.to(state.native).to(x.dtype), x) for x in (k, v))
    return replace(call, q=q, k=k, v=v)


def finish(states: Sequence[LayerState]) -> None:
    """After the newest token of a layer: drop what anchors leave behind, compact if that is due."""
    first = states[0]
    if first.sequences is not None:
        every = [(state, ended(state)) for state in states]
        some = [(state, found) for state, found in every if found is not None]
        stayed = carry_out([found for _, found in some])
        for (state, _), (keep, _) in zip(some, stayed, strict=True):
            if state.scorer is not None and keep is not None:
                state.scorer.drop(keep)
        for state, _ in some:
            state.note_peak()
    if first.layer.clock.due(first.seen, first.prompt) and not first.rereads:
        compact_states(states)


def compact_states(
    states: Sequence[LayerState],
    scores: Sequence[Tensor | None] | None = None,
    targets: Sequence[int | None] | None = None,
) -> None:
    """Compact all heads of a layer after its newest token.

    Args:
        states: of the heads, those that are alike in one.
        scores: ranks of each, if they are known already.
        targets: slots to leave of each, instead of those of its layout.
    """
    none: list[None] = [None] * len(states)
    every = zip(states, scores or none, targets or none, strict=True)
    decisions = [
        decide(state, ranks, target) if state.sequences is None else evicted(state)
        for state, ranks, target in every
    ]
    for state, (keep, choice) in zip(states, carry_out(decisions), strict=True):
        if state.scorer is not None:
            if choice is not None and choice.sums is not None and state.scorer.running is not None:
                state.scorer.running.hold(choice.sums, choice.born, state.store.n)
            else:
                state.scorer.keep(keep)
        state.note_peak()


def _attend(state: LayerState, call: Call, due: int | None) -> Tensor:
    """Attend from the newest tokens, which the store already holds, and let the rule observe."""
    out, found = _attend_dense(state, call, due, hidden(state))
    if state.scorer is not None:
        if state.rule is not None and "queries" in state.rule.needs:
            queries = call.q if state.reindex else state.unturned(call.q)[0]
            found = replace(found, queries=queries)
        if state.predicted is not None:
            found = replace(found, predicted=state.foreseen(found.count))
        state.scorer.observe(found)
    return out


def _attend_dense(
    state: LayerState, call: Call, due: int | None, hidden: Sequence[int]
) -> tuple[Tensor, Segment]:
    """`_attend` over slots as they are read back, but for the `hidden` ones."""
    keys, values = state.read()
    n, m = keys.shape[2], call.count
    q = state.turned(call.q, n - m)
    seen = None
    if hidden:
        seen = sent(np.setdiff1d(np.arange(n), hidden), q.device)
        keys, values, n = keys.index_select(2, seen), values.index_select(2, seen), len(seen)
    if not wants_attention(state):
        born = torch.zeros(n, dtype=torch.long, device=q.device)
        if m > 1:
            born = torch.arange(m - n, m, device=q.device).clamp_min_(0)
        never = torch.full_like(born, m)
        out, _ = lifetime_attention.record(
            state.impls, q, keys, values, born, never, first_query=0, **call.how
        )
        return out, Segment(state.seen, m)
    assert state.scorer is not None and state.rule is not None
    after = 0 if due is None else due - state.seen - m
    weights = _row_weights(state, n, m, after, q.device)
    out, received = scored_attention.record(state.impls, q, keys, values, weights, **call.how)
    rows = None
    if "rows" in state.rule.needs:
        many = state.scorer.watched(m, after)
        rows = attention_rows(q[:, :, m - many :], keys, **call.how)
    if seen is not None:
        received = _spread(received, seen, state.store.n)
        rows = None if rows is None else _spread(rows, seen, state.store.n)
    return out, Segment(state.seen, m, received, rows=rows)


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


def _row_weights(state: LayerState, n: int, m: int, after: int, device: torch.device) -> Tensor:
    """Weights of the newest `m` of `n` tokens, `after` tokens before the next compaction.

    Kept, because a full cache meets the same numbers at every compaction, and all layers do.
    """
    assert state.scorer is not None
    interval, inference = state.layer.policy.interval, torch.is_inference_mode_enabled()
    key = state.rule, interval, n, m, after, device, inference
    if key not in _weights:
        if len(_weights) > 256:
            _weights.clear()
        rows = torch.arange(m, device=device)
        _weights[key] = state.scorer.row_weights(n - m + rows + 1, m + after - 1 - rows)
    return _weights[key]


_weights: dict[tuple[object, ...], Tensor] = {}


def wants_attention(state: LayerState) -> bool:
    """Whether the rule reads what slots receive."""
    return state.rule is not None and "attention" in state.rule.needs


# -- anchors: known on the host, and alike in all heads but for ordinary tokens of a rule ----------


def take_ahead(state: LayerState, most: int) -> int:
    """Hold the flags of the next tokens, as many as attend alike; returns how many those are.

    A token that does not see earlier anchors (isolated, as in AnLLM) attends alone.
    """
    assert state.sequences is not None and state.stream is not None
    flags = state.stream.flags(state.seen, most)
    many = state.sequences.ahead(flags, most)
    if many > 1 and state.sequences.isolated(flags[:many])[-1]:
        many -= 1
    state.sequences.take(flags[:many])
    return many


def isolated(state: LayerState) -> bool:
    """Whether there are slots that the next token does not see."""
    if state.sequences is None or not state.sequences.anchor.any():
        return False
    assert state.stream is not None
    return bool(state.sequences.isolated(state.stream.flags(state.seen, 1))[0])


def hidden(state: LayerState) -> list[int]:
    """Slots that the newest token does not see."""
    return [] if state.sequences is None else state.sequences.hidden().tolist()


def ended(state: LayerState) -> Decision | None:
    """Drop what the newest token leaves behind; None if it leaves nothing."""
    assert state.sequences is not None
    stays = state.sequences.kept_at_end()
    if stays is None:
        return None
    scores = None
    if state.scorer is not None and state.layer.policy.tagged:
        scores = state.scorer.ranks(state.slots())
    state.sequences.keep(stays)
    return settled(state, sent(stays, state.store.device), scores)


def evicted(state: LayerState) -> Decision:
    """Compact the layer: ordinary tokens go first, then the oldest anchors."""
    sequences, layer, scorer = state.sequences, state.layer, state.scorer
    assert sequences is not None
    n, target = state.store.n, layer.target
    over = target is not None and n > target
    scores = keep = None
    if scorer is not None and (over or layer.policy.tagged):
        scores = scorer.ranks(state.slots())
    if over and target is not None:
        found = sequences.eviction(target)
        keep = sent(found.stays, state.store.device)
        if scores is not None and n - target < found.last - found.first:
            keep = best_between(scores, found.first, found.last, n - target)
        sequences.keep(found.stays)
    return settled(state, keep, scores)
