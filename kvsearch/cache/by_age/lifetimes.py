"""One pass over a text for policies that decide by age alone: every key has a life, not a mask.

Without scores the schedule is known in advance. A key is an entry that queries `birth <= i < death`
see; a key that is quantised at a compaction is two entries, one before and one after. Re-indexed
positions need two frames: keys behind the ladder's cursor keep their slot (`fixed`), keys ahead of
it all move together with the query (`moving`), so inside each frame one rotation serves many steps.
"""

from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvsearch.cache.by_age.plans import Plan, applies, compacted, plan
from kvsearch.cache.by_age.versions import Versions, leave, versions
from kvsearch.cache.state import LayerState
from kvsearch.policy.schedule import Ints
from kvsearch_kernels.host_to_device import sent
from kvsearch_kernels.lifetime_attention import lifetime_attention

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

    Keys, values and queries are as in `heads.advance`, after rounding and un-rotation.
    """
    seen, M = state.seen, q.shape[2]
    T = seen + M
    flags = None if state.stream is None else state.stream.flags(0, T)
    lives = plan(state.layer, T, state.prompt, flags)
    table = versions(state, lives.before(seen), k, v)
    if _skips_dead_keys(q, k, v, scale, softcap):
        out = _attend(state, lives, q, table, seen, scale, softcap)
    else:
        out, block = q.new_empty(*q.shape[:3], v.shape[3]), BLOCK
        if not state.layer.policy.evicts:
            block = 2 * BLOCK
        for start in range(0, M, block):
            now = slice(start, min(start + block, M))
            part = q[:, :, now]
            out[:, :, now] = _attend(state, lives, part, table, seen + start, scale, softcap)
    if state.whole is None:
        _leave(state, lives, k, v, table.row)
    state.seen = T
    return out


def _skips_dead_keys(
    q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None
) -> bool:  # fmt: skip
    """Whether one launch serves all queries: the kernel passes over blocks of dead keys itself."""
    if q.device.type == "cpu" or k.requires_grad:
        return False
    life = torch.empty(1, dtype=torch.long, device=q.device)
    one = (q[:, :, :1], k[:, :, :1], v[:, :, :1], life, life)
    return lifetime_attention.pick(*one, first_query=0, scale=scale, softcap=softcap) == "triton"


class Entries(NamedTuple):
    """Keys that some query of a block sees, those of the fixed frame first.

    Attributes:
        rows: where their values are, see `Versions`, `[E]`.
        birth, death, angle: of each key `[E]`.
        anchors: token of each key that is an anchor, -1 of others `[E]`; None if no query is one.
        frames: of each frame that has keys, which they are, their birth and death, and the rotary
            index of each query in it `[M]`.
    """

    rows: Ints
    birth: Tensor
    death: Tensor
    angle: Tensor
    anchors: Tensor | None
    frames: list[tuple[slice, Tensor, Tensor, Tensor]]


def _entries(lives: Plan, table: Versions, start: int, stop: int, device: torch.device) -> Entries:
    """Keys that queries `[start, stop)` see; on a device made for the first of layers alike."""
    key = "entries", device, start, stop, torch.is_inference_mode_enabled()
    if key in lives.known:
        return lives.known[key]
    some = lives.around(start, stop)
    alone = lives.isolated(some, start, stop)
    birth, death = sent(lives.birth[some], device), sent(lives.death[some], device)
    split = int(lives.fixed[some].sum())
    found = Entries(
        table.rows(lives.token[some], lives.quantised[some]), birth, death,
        sent(lives.angle[some], device), None if alone is None else sent(alone, device),
        [
            (part, birth[part], death[part], sent(at[start:stop], device))
            for part, at in (
                (slice(0, split), lives.fixed_at), (slice(split, len(some)), lives.moving_at)
            )
            if part.stop > part.start
        ],
    )  # fmt: skip
    if device.type != "cpu":
        lives.known[key] = found
    return found


def _attend(
    state: LayerState,
    lives: Plan,
    q: Tensor,
    table: Versions,
    start: int,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Attention of one block of queries over the keys that are alive around it."""
    keys = _entries(lives, table, start, start + q.shape[2], q.device)
    if _in_place(state, q, table):
        return _attend_parts(state, q, table, keys, start, scale, softcap)
    k, v = table.take(keys.rows)
    attend = partial(lifetime_attention.record, state.impls, scale=scale, softcap=softcap,
                     first_query=start)  # fmt: skip
    if not state.reindex:
        return attend(q, k, v, keys.birth, keys.death, anchors=keys.anchors)[0]
    assert state.rotary is not None
    if k.requires_grad:  # only the reference's log-sum-exp, by which frames are joined, has one
        attend = partial(lifetime_attention.run, "reference", scale=scale, softcap=softcap,
                         first_query=start)  # fmt: skip
    k = state.rotary.turn(k, keys.angle)
    return merge([
        attend(state.rotary.turn(q, at), k[:, :, part], v[:, :, part], birth, death)
        for part, birth, death, at in keys.frames
    ])  # fmt: skip


def merge(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Join attention over disjoint sets of keys by their log-sum-exps, in the type of those."""
    if len(parts) == 1:
        return parts[0][0]
    total = torch.stack([lse for _, lse in parts]).logsumexp(0)
    whole: Tensor | None = None
    for out, lse in parts:  # one after the other: a stack would hold all of them twice
        share = out * (lse - total).exp().unsqueeze(-1)
        whole = share if whole is None else whole + share
    assert whole is not None
    return whole.to(parts[0][0].dtype)


def _in_place(state: LayerState, q: Tensor, table: Versions) -> bool:
    """Whether keys are attended where they are, instead of being gathered: almost all are alive."""
    p = state.layer.policy
    plain = not (p.evicts or p.anchors is not None or table.parts[0][0].requires_grad)
    return plain and len(table.parts) > 1 and q.device.type == "cpu"


def _attend_parts(
    state: LayerState, q: Tensor, table: Versions, keys: Entries, start: int, scale: float,
    softcap: float | None,
) -> Tensor:  # fmt: skip
    """`_attend` to each part of the values by itself, without a copy of them."""
    rows = keys.rows
    kind = torch.promote_types(q.dtype, torch.float32)
    whole: tuple[Tensor, Tensor] | None = None
    for first, last, (k, v) in table.ranges():
        mine = (first <= rows) & (rows < last)
        if not mine.any():
            continue
        a, b = rows[mine].min(), rows[mine].max() + 1
        birth, death = np.full((2, b - a), 0, dtype=np.int64)  # what no query sees any more
        birth[rows[mine] - a] = keys.birth.numpy()[mine]
        death[rows[mine] - a] = keys.death.numpy()[mine]
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
