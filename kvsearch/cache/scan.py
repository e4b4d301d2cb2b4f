"""Eviction by score, fast: fill the cache in large pieces, then evict in place.

With original positions the order of slots does not matter to attention, so a compaction need not
move what stays: survivors among the newest take the places of the evicted. The decisions are those
of the segments, which also take what is left over: up to the first compaction, the one compaction
that evicts less than an interval, and the tokens after the last one.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from kvsearch.cache import filling, inplace, segments
from kvsearch.cache.state import LayerState


def applies(state: LayerState, m: int) -> bool:
    """Whether a call that brings `m` tokens to `state` can be scanned."""
    p = state.layer.policy
    return (
        not state.packed
        and state.rule is not None
        and "scan" in state.rule.fast
        and p.evicts
        and p.trigger != "prompt"
        and p.ladder is None
        and p.anchors is None
        and p.positions == "original"
        and p.quantised_on_arrival
        and m >= 2 * p.interval
    )


def run(
    state: LayerState, q: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: float | None
) -> Tensor:
    """Replay many tokens, from whatever the state holds.

    Arguments are as in `engine.advance`, after rounding.
    """
    layer, c, total = state.layer, state.layer.policy.interval, q.shape[2]
    assert layer.target is not None
    quantised = segments.quantise_ahead(state, k, v)
    out, done = q.new_empty(*q.shape[:3], v.shape[3]), 0
    how: Callable[..., Tensor]
    while done < total:
        held, whole = state.store.n, (total - done) // c
        room = (layer.target - held) // c
        at_compaction = state.store.residual == 0 and layer.clock.due(state.seen, state.prompt)
        if at_compaction and min(room, whole) > 0:
            step, how = min(room, whole) * c, partial(filling.run, state)
        elif at_compaction and held == layer.target and whole > 0:
            step, how = whole * c, partial(inplace.run, state)
        else:
            due = layer.clock.after(state.seen, state.prompt)
            assert due is not None
            step, how = min(due - state.seen, total - done), partial(segments.run, state)
        part = slice(done, done + step)
        x = (q[:, :, part], k[:, :, part], v[:, :, part])
        ready = None if quantised is None else (quantised[0][:, :, part], quantised[1][:, :, part])
        out[:, :, part] = how(*x, ready, scale=scale, softcap=softcap)
        done += step
    return out
