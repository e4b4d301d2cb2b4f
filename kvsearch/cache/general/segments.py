"""Taking in tokens piece by piece, from one compaction to the next; serves every policy."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kvsearch.cache.general import sequences
from kvsearch.cache.general.compaction import carry_out, decide
from kvsearch.cache.slots.formats import straight
from kvsearch.cache.state import LayerState
from kvsearch.rules import Segment, Slots
from kvsearch_kernels.host_to_device import sent
from kvsearch_kernels.lifetime_attention import lifetime_attention
from kvsearch_kernels.scored_attention import scored_attention

ROWS = 512  # queries per attention map, so that a long prompt needs no T x T memory


def run(
    state: LayerState,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    softcap: float | None,
    compacts: bool = True,
) -> Tensor:
    """Take in tokens, compacting where a compaction is due, unless a caller does that.

    Arguments are as in `heads.advance`, after rounding.
    """
    out: list[Tensor] = []
    done, total = 0, q.shape[2]
    while done < total:
        due = state.layer.clock.after(state.seen, state.prompt)
        left = total - done if due is None else min(due - state.seen, total - done)
        if state.sequences is not None:
            left = sequences.take_ahead(state, min(left, ROWS))
        part = slice(done, done + min(left, ROWS))
        state.store.append(k[:, :, part], v[:, :, part])
        out.append(_attend(state, q[:, :, part], due, scale, softcap))
        done = part.stop
        state.seen += part.stop - part.start
        state.note_peak()
        if compacts:
            finish([state])
    return out[0] if len(out) == 1 else torch.cat(out, 2)


def arriving(state: LayerState, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as a cache takes them in: rounded, turned back if re-indexed."""
    m = q.shape[2]
    if state.seen == 0:
        state.begin(q, k)
    if state.reindex:
        assert state.rotary is not None
        stop = state.seen + m
        index = torch.arange(state.seen, stop, device=q.device, dtype=torch.float32)
        q, k = state.rotary.undo(index, q, k)
    return (
        q,
        straight(k.to(state.native).to(k.dtype), k),
        straight(v.to(state.native).to(v.dtype), v),
    )


def finish(states: Sequence[LayerState]) -> None:
    """After the newest token of a layer: drop what anchors leave behind, compact if that is due."""
    first = states[0]
    if first.sequences is not None:
        ended = [(state, sequences.ended(state, slots_of(state))) for state in states]
        some = [(state, found) for state, found in ended if found is not None]
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
    decisions = []
    for state, ranks, target in zip(states, scores or none, targets or none, strict=True):
        slots = slots_of(state)
        if state.sequences is not None:
            decisions.append(sequences.evicted(state, slots))
            continue
        decision, state.cursor = decide(
            state.layer, state.store, state.scorer, slots, state.cursor, ranks, target
        )
        decisions.append(decision)
    for state, (keep, choice) in zip(states, carry_out(decisions), strict=True):
        if state.scorer is not None:
            if choice is not None and choice.sums is not None and state.scorer.running is not None:
                state.scorer.running.hold(choice.sums, choice.born, state.store.n)
            else:
                state.scorer.keep(keep)
        state.note_peak()


def slots_of(state: LayerState) -> Slots:
    """What a state holds now, for its scorer to look at."""

    def read() -> tuple[Tensor, Tensor]:
        keys, values = state.store.read()
        if state.reindex:
            assert state.rotary is not None
            keys = state.rotary.turn_slots(keys, 0, keep=not state.packed)
        return keys, values

    n, target = state.store.n, state.layer.target
    return Slots(
        seen=state.seen,
        count=n,
        position=n if state.reindex else state.seen,
        recent_from=n - state.layer.policy.recent_window,
        read=read,
        sinks=state.layer.policy.sinks,
        stay=target if n > (target or 0) else None,
    )


def _attend(
    state: LayerState, q: Tensor, due: int | None, scale: float, softcap: float | None
) -> Tensor:
    """Attend from the newest tokens, which the store already holds, and let the rule observe."""
    out, found = _attend_dense(state, q, due, sequences.hidden(state), scale, softcap)
    if state.scorer is not None:
        if state.rule is not None and "queries" in state.rule.needs:
            found = replace(found, queries=_unrotated(state, q))
        if state.predicted is not None:
            found = replace(found, predicted=state.foreseen(found.count))
        state.scorer.observe(found)
    return out


def _attend_dense(
    state: LayerState, q: Tensor, due: int | None, hidden: Sequence[int], scale: float,
    softcap: float | None,
) -> tuple[Tensor, Segment]:  # fmt: skip
    """`_attend` over slots as they are read back, but for the `hidden` ones."""
    keys, values = state.store.read()
    n, m = keys.shape[2], q.shape[2]
    if state.reindex:
        assert state.rotary is not None
        keep = not state.packed
        keys = state.rotary.turn_slots(keys, 0, keep=keep)
        q = state.rotary.turn_slots(q, n - m, keep=keep)
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
            state.impls, q, keys, values, born, never, first_query=0, scale=scale, softcap=softcap
        )
        return out, Segment(state.seen, m)
    assert state.scorer is not None and state.rule is not None
    after = 0 if due is None else due - state.seen - m
    weights = _row_weights(state, n, m, after, q.device)
    out, received = scored_attention.record(
        state.impls, q, keys, values, weights, scale=scale, softcap=softcap
    )
    rows = None
    if "rows" in state.rule.needs:
        many = state.scorer.watched(m, after)
        rows = attention_rows(q[:, :, m - many :], keys, scale=scale, softcap=softcap)
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


def _unrotated(state: LayerState, q: Tensor) -> Tensor:
    """Queries as they were before the model turned them to their position."""
    if state.reindex:
        return q
    assert state.rotary is not None
    index = torch.arange(state.seen, state.seen + q.shape[2], device=q.device, dtype=torch.float32)
    return state.rotary.undo(index, q)[0]
