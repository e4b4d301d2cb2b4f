"""Heads that share their layer's slots anew at every compaction (AdaKV, arXiv:2407.11550).

The best-ranked slots of all heads together are counted by head: a head gets as many as it has among
them, mixed with an even share so that none is starved. The layer's total never changes.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise

import torch
from torch import Tensor

from kvsearch.cache.by_segment import dense_staging, segments
from kvsearch.cache.head_group import Call, LayerState
from kvsearch.errors import PolicyError


def run(states: Sequence[LayerState], call: Call) -> Tensor:
    """Take in new tokens in all heads of a layer, which compact together.

    Every state has one KV head.

    Raises:
        PolicyError: there are several sequences, whose heads would get different numbers of slots.
    """
    if call.q.shape[0] > 1:
        raise PolicyError("budgets 'adakv' serve one sequence at a time: batches are not supported")
    heads = [segments.arriving(state, call.heads(state.layer.heads)) for state in states]
    out, first, total, done = call.room(), states[0], call.count, 0
    with ExitStack() as stack:
        if dense_staging.applies(first, call):
            for state, mine in zip(states, heads, strict=True):
                stack.enter_context(dense_staging.staged(state, mine))
        while done < total:
            due = first.layer.clock.after(first.seen, first.prompt)
            now = slice(done, total if due is None else min(done + due - first.seen, total))
            for state, mine in zip(states, heads, strict=True):
                found = segments.run(state, mine.tokens(now), compacts=False)
                out[:, call.queries(state.layer.heads), now] = found
            done = now.stop
            if first.seen == due and not first.rereads:
                compact(states)
    return out


def compact(states: Sequence[LayerState]) -> None:
    """Compact all heads of a layer, or of several, which end with the slots of an even split.

    How many slots each head keeps is for the host to know, which makes tensors of so many: it waits
    for the device.
    """
    first, held = states[0], sum(state.store.n for state in states)
    target = first.layer.target
    assert target is not None
    if held <= target * len(states):
        for mine in _layers(states):
            segments.compact_states(states[mine])
        return
    ranks = [s.scorer.ranks(s.slots()) for s in states if s.scorer is not None]
    p = first.layer.policy
    fixed = p.sinks + p.recent_window
    room = [state.store.n - fixed for state in states]
    counts = _counts(states, ranks, target).to("cpu").tolist()
    targets = [fixed + n for n in shares(counts, target - fixed, room, p.budgets.floor)]
    for mine in _layers(states):
        segments.compact_states(states[mine], ranks[mine], targets[mine])


def _counts(states: Sequence[LayerState], ranks: Sequence[Tensor], target: int) -> Tensor:
    """Of the layer's best-ranked slots, how many each head has `[H]`."""
    p = states[0].layer.policy
    even = target - p.sinks - p.recent_window
    chosen = [r[0, 0, p.sinks : r.shape[-1] - p.recent_window] for r in ranks]
    every = torch.cat([x.to(chosen[0].device) for x in chosen])
    best = every.topk(even * len(states), sorted=False).indices
    room = [len(r) for r in chosen]
    among = best.new_zeros(sum(room)).index_fill_(0, best, 1)
    return torch.stack([head.sum() for head in among.split(room)])


def _layers(states: Sequence[LayerState]) -> list[slice]:
    """Where the heads of each layer are among `states`."""
    many = len(states)
    ends = (i for i in range(1, many) if states[i].layer.layer != states[i - 1].layer.layer)
    return [slice(a, b) for a, b in pairwise([0, *ends, many])]


def shares(counts: Sequence[int], even: int, room: Sequence[int], floor: float) -> list[int]:
    """Evictable slots that each head keeps; they add up to `even` for every head.

    Args:
        counts: of the layer's best-ranked slots, how many each head has.
        even: slots of an even split.
        room: slots that each head has.
        floor: share of an even split that every head gets.
    """
    exact = [floor * even + (1 - floor) * n for n in counts]
    got = [min(int(x), most) for x, most in zip(exact, room, strict=True)]
    order = sorted(range(len(got)), key=lambda h: got[h] - exact[h])
    missing = even * len(got) - sum(got)
    while missing:  # what rounding, or a head with no more slots, has left over
        for h in order:
            if missing and got[h] < room[h]:
                got[h] += 1
                missing -= 1
    return got
