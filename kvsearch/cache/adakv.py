"""Heads that share their layer's slots anew at every compaction (AdaKV, arXiv:2407.11550).

The best-ranked slots of all heads together are counted by head: a head gets as many as it has among
them, mixed with an even share so that none is starved. The layer's total never changes.
"""

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from kvsearch.cache import segments, staging
from kvsearch.cache.engine import arriving
from kvsearch.cache.state import LayerState
from kvsearch.errors import PolicyError

Arrived = tuple[Tensor, Tensor, Tensor]  # queries, keys and values of one head


def run(
    states: Sequence[LayerState],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Take in new tokens in all heads of a layer, which compact together.

    Arguments are as in `heads.advance`; every state has one KV head.

    Raises:
        PolicyError: there are several sequences, whose heads would get different numbers of slots.
    """
    if q.shape[0] > 1:
        raise PolicyError("budgets 'adakv' serve one sequence at a time: batches are not supported")
    group = q.shape[1] // k.shape[1]
    heads = [
        arriving(state, q[:, h * group : (h + 1) * group], k[:, h : h + 1], v[:, h : h + 1])
        for h, state in enumerate(states)
    ]
    out = q.new_empty(*q.shape[:3], v.shape[3])
    with ExitStack() as stack:
        if staging.applies(states[0], k):
            for state, (_, hk, hv) in zip(states, heads, strict=True):
                stack.enter_context(staging.staged(state, hk, hv))
        _take(states, heads, out, scale=scale, softcap=softcap)
    return out


def _take(
    states: Sequence[LayerState], heads: Sequence[Arrived], out: Tensor, *, scale: float,
    softcap: float | None,
) -> None:  # fmt: skip
    """`run` of tokens that have arrived in every head; writes `out` `[B, Hq, M, Dv]`."""
    group = out.shape[1] // len(states)
    parts = [(*x, segments.quantise_ahead(s, *x[1:])) for s, x in zip(states, heads, strict=True)]
    done, total, first = 0, out.shape[2], states[0]
    while done < total:
        due = first.layer.clock.after(first.seen, first.prompt)
        step = total - done if due is None else min(due - first.seen, total - done)
        now = slice(done, done + step)
        for h, (state, (hq, hk, hv, low)) in enumerate(zip(states, parts, strict=True)):
            ready = None if low is None else (low[0][:, :, now], low[1][:, :, now])
            out[:, h * group : (h + 1) * group, now] = segments.run(
                state, hq[:, :, now], hk[:, :, now], hv[:, :, now], ready,
                scale=scale, softcap=softcap, compacts=False,
            )  # fmt: skip
        done = now.stop
        if first.seen == due:
            _compact(states)


def _compact(states: Sequence[LayerState]) -> None:
    """Compact all heads of a layer, which ends with the slots of an even split."""
    target, held = states[0].layer.target, sum(state.store.n for state in states)
    assert target is not None
    ranks: list[Tensor | None] = [None] * len(states)
    targets: list[int | None] = [None] * len(states)
    if held > target * len(states):
        found = [s.scorer.ranks(segments.slots_of(s)) for s in states if s.scorer is not None]
        ranks, targets = [*found], [*_shares(states, found, target)]
    for state, scores, left in zip(states, ranks, targets, strict=True):
        segments.compact_state(state, scores, left)
        state.note_peak()


def _shares(states: Sequence[LayerState], ranks: Sequence[Tensor], target: int) -> list[int]:
    """Slots that each head keeps; they add up to `target` for every head."""
    p = states[0].layer.policy
    fixed = p.sinks + p.recent_window
    room = [state.store.n - fixed for state in states]
    even = target - fixed
    chosen = [r[0, 0, p.sinks : r.shape[-1] - p.recent_window] for r in ranks]
    best = torch.cat(chosen).topk(even * len(states), sorted=False).indices
    ends = torch.tensor(room, device=best.device).cumsum(0)
    counts = torch.bucketize(best, ends, right=True).bincount(minlength=len(states)).tolist()
    exact = [p.budgets.floor * even + (1 - p.budgets.floor) * n for n in counts]
    got = [min(int(x), most) for x, most in zip(exact, room, strict=True)]
    order = sorted(range(len(got)), key=lambda h: got[h] - exact[h])
    missing = even * len(states) - sum(got)
    while missing:  # what rounding, or a head with no more slots, has left over
        for h in order:
            if missing and got[h] < room[h]:
                got[h] += 1
                missing -= 1
    return [fixed + n for n in got]
