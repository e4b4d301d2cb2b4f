"""One pass over a text for policies that decide by age alone: every key has a life, not a mask.

Without scores the schedule is known in advance. A key is an entry that queries `birth <= i < death`
see; a key that is quantised at a compaction is two entries, one before and one after. Re-indexed
positions need two frames: keys behind the ladder's cursor keep their slot (`fixed`), keys ahead of
it all move together with the query (`moving`), so inside each frame one rotation serves many steps.
"""

from functools import partial

import numpy as np
import torch
from torch import Tensor

from kvsearch.cache import at_once
from kvsearch.cache.at_once import merge
from kvsearch.cache.plans import Plan, applies, compacted, plan
from kvsearch.cache.state import LayerState
from kvsearch.cache.versions import Versions, leave, versions
from kvsearch.policy.schedule import Ints
from kvsearch_kernels.lifetime_attention import lifetime_attention
from kvsearch_kernels.sending import sent

BLOCK = 128  # queries that share one gather of the keys alive around them
LEAST = 16  # tokens for which a plan is made anew


def serves(state: LayerState, m: int) -> bool:
    """Whether one pass is the way for `m` tokens: the first ones, or across a compaction."""
    if not applies(state.layer.policy):
        return False
    due = state.layer.clock.after(state.seen, state.prompt)
    return state.seen == 0 or (m >= LEAST and due is not None and state.seen + m > due)


def replay(
    state: LayerState, q: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: float | None
) -> Tensor:
    """Attend over many tokens at once, and leave the cache as the stream would.

    Keys, values and queries are as in `engine.advance`, after rounding and un-rotation.
    """
    seen, M = state.seen, q.shape[2]
    T = seen + M
    flags = None if state.stream is None else state.stream.flags(0, T)
    lives = plan(state.layer, T, state.prompt, flags)
    table = versions(state, lives.before(seen), k, v)
    out = at_once.attend(state, lives, q, table, scale=scale, softcap=softcap)
    if out is None:
        out = q.new_empty(*q.shape[:3], v.shape[3])
        block = BLOCK if state.layer.policy.evicts else 2 * BLOCK
        for start in range(0, M, block):
            rows = slice(start, min(start + block, M))
            part = q[:, :, rows]
            out[:, :, rows] = _attend(state, lives, part, table, seen + start, scale, softcap)
    if state.whole is None:
        _leave(state, lives, k, v, table.row)
    state.seen = T
    return out


def _attend(
    state: LayerState,
    lives: Plan,
    q: Tensor,
    table: Versions,
    start: int,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Attention of one block of queries over the entries alive around it."""
    stop = start + q.shape[2]
    entries = lives.around(start, stop)
    rows = table.rows(lives.token[entries], lives.quantised[entries])
    if _in_place(state, q, table):
        return _attend_parts(state, lives, q, table, entries, rows, start, scale, softcap)
    k, v = table.take(rows)
    birth = sent(lives.birth[entries], q.device)
    death = sent(lives.death[entries], q.device)
    if not state.reindex:
        alone = lives.isolated(entries, start, stop)
        anchors = None if alone is None else sent(alone, q.device)
        return lifetime_attention.record(
            state.impls, q, k, v, birth, death, first_query=start, scale=scale, softcap=softcap,
            anchors=anchors,
        )[0]  # fmt: skip
    assert state.rotary is not None
    attend = partial(lifetime_attention.record, state.impls)
    if k.requires_grad:  # only the reference's log-sum-exp, by which frames are joined, has one
        attend = partial(lifetime_attention.run, "reference")
    k = state.rotary.turn(k, sent(lives.angle[entries], k.device))
    split = int(lives.fixed[entries].sum())
    parts = []
    for part, at in ((slice(None, split), lives.fixed_at), (slice(split, None), lives.moving_at)):
        if birth[part].numel():
            turned = state.rotary.turn(q, sent(at[start:stop], q.device))
            parts.append(
                attend(
                    turned,
                    k[:, :, part],
                    v[:, :, part],
                    birth[part],
                    death[part],
                    first_query=start,
                    scale=scale,
                    softcap=softcap,
                )
            )
    return merge(parts)


def _in_place(state: LayerState, q: Tensor, table: Versions) -> bool:
    """Whether keys are attended where they are, instead of being gathered: almost all are alive."""
    p = state.layer.policy
    plain = not (p.evicts or p.anchors is not None or table.parts[0][0].requires_grad)
    return plain and len(table.parts) > 1 and q.device.type == "cpu"


def _attend_parts(
    state: LayerState, lives: Plan, q: Tensor, table: Versions, entries: Ints, rows: Ints,
    start: int, scale: float, softcap: float | None,
) -> Tensor:  # fmt: skip
    """`_attend` to each part of the values by itself, without a copy of them."""
    kind = torch.promote_types(q.dtype, torch.float32)
    whole: tuple[Tensor, Tensor] | None = None
    for first, last, (k, v) in table.ranges():
        mine = (first <= rows) & (rows < last)
        if not mine.any():
            continue
        a, b = rows[mine].min(), rows[mine].max() + 1
        birth, death = np.full((2, b - a), 0, dtype=np.int64)  # what no query sees any more
        birth[rows[mine] - a] = lives.birth[entries[mine]]
        death[rows[mine] - a] = lives.death[entries[mine]]
        part = slice(a - first, b - first)
        out, lse = lifetime_attention.record(
            state.impls, q.to(kind), k[:, :, part], v[:, :, part], torch.from_numpy(birth),
            torch.from_numpy(death), first_query=start, scale=scale, softcap=softcap,
        )  # fmt: skip
        if whole is None:
            whole = out, lse
            continue
        total = torch.logaddexp(whole[1], lse)
        for part_out, part_lse in (whole, (out, lse)):
            part_out.mul_((part_lse - total).exp_().unsqueeze(-1))
        whole = whole[0].add_(out), total
    assert whole is not None
    return whole[0].to(q.dtype)


def _leave(state: LayerState, lives: Plan, k: Tensor, v: Tensor, row: Ints) -> None:
    """Fill the store with what is held after the last token."""
    layer, policy, T = state.layer, state.layer.policy, len(row)
    old = compacted(layer, lives.held + 1, state.prompt, lives.course) <= T
    low = compacted(layer, lives.held + 1 + policy.fp16_recent, state.prompt, lives.course) <= T
    pools = np.where(low, 0, len(policy.tiers)).astype(np.uint8)
    pools[lives.held < policy.fp16_sinks] = len(policy.tiers)
    key = "pools", k.device, T, pools.tobytes()  # policies may behave alike in unlike pools
    if key not in lives.known:
        lives.known[key] = sent(pools, k.device)
    leave(state, k, v, lives.held, row, (pools, lives.known[key]), int((~old).sum()))
    state.cursor = lives.cursor
    if lives.course is not None:
        state.sequences = lives.course.end.copy()
