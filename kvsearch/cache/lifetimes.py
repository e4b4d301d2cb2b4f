"""One pass over a text for policies that decide by age alone: every key has a life, not a mask.

Without scores the schedule is known in advance. A key is an entry that queries `birth <= i < death`
see; a key that is quantised at a compaction is two entries, one before and one after. Re-indexed
positions need two frames: keys behind the ladder's cursor keep their slot (`fixed`), keys ahead of
it all move together with the query (`moving`), so inside each frame one rotation serves many steps.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from kvsearch.cache.state import LayerState
from kvsearch.cache.versions import Versions, leave, versions
from kvsearch.policy import LayerLayout, Policy
from kvsearch.policy.closings import Course, Flags, course
from kvsearch.policy.schedule import NEVER, Ints
from kvsearch_kernels.lifetime_attention import lifetime_attention

BLOCK = 128  # queries that share one gather of the keys alive around them
LEAST = 16  # tokens for which a plan is made anew


def applies(policy: Policy) -> bool:
    """Whether a text can be replayed in one pass."""
    moved = policy.anchors is not None and policy.positions == "cache"  # by every sequence anew
    return not policy.scored and not policy.ranks_tiers and not moved


@dataclass(frozen=True, eq=False)
class Plan:
    """Lives of all keys of one layer over a text of `T` tokens.

    Attributes:
        token, quantised, fixed, angle, birth, death: entries `[E]`: which token, whether its
            quantised value, which frame, the rotary index in that frame, and its life.
        moving_at, fixed_at: rotary index of each query in either frame `[T]`.
        held: tokens held at the end, in order of slots.
        cursor: where the ladder's next block starts.
        course: what anchors do, where there are such.
    """

    token: Ints
    quantised: Ints
    fixed: Ints
    angle: Ints
    birth: Ints
    death: Ints
    moving_at: Ints
    fixed_at: Ints
    held: Ints
    cursor: int
    course: Course | None = None

    def before(self, seen: int) -> Ints:
        """Tokens held after the first `seen`, in order of slots."""
        alive = (self.birth <= seen) & (self.death > seen) & (self.token < seen)
        return np.unique(self.token[alive])

    def around(self, start: int, stop: int) -> Ints:
        """Entries that some query of `[start, stop)` sees, those of the fixed frame first."""
        alive = np.flatnonzero((self.birth < stop) & (self.death > start))
        return alive[np.argsort(1 - self.fixed[alive], kind="stable")]

    def isolated(self, entries: Ints, start: int, stop: int) -> Ints | None:
        """Token of each entry that is an anchor, -1 of others; None if no query is one."""
        if self.course is None or not self.course.isolates[start:stop].any():
            return None
        token = self.token[entries]
        return np.where(self.course.isolates[token], token, -1)


def plan(layer: LayerLayout, T: int, prompt: int, flags: Flags | None = None) -> Plan:
    """Lives over a text of `T` tokens whose first `prompt` belong to the prompt.

    Args:
        layer: integers of the layer.
        T: tokens of the text.
        prompt: how many of them belong to the prompt.
        flags: which of them are anchors `[T]`, where the policy has such.
    """
    found = b"" if flags is None else flags.tobytes()
    key = (layer.policy.fingerprint(), layer.slots, layer.offset, layer.rungs, T, prompt, found)
    if key not in _plans:
        if len(_plans) > 256:
            _plans.clear()
        _plans[key] = _make_plan(layer, T, prompt, flags)
    return _plans[key]


_plans: dict[tuple[object, ...], Plan] = {}


def forget_plans() -> None:
    """Plan anew, as for lengths that have not been seen."""
    _plans.clear()


def _make_plan(layer: LayerLayout, T: int, prompt: int, flags: Flags | None) -> Plan:
    path = None
    if flags is not None:
        path = course(layer, flags, prompt)
        every = np.arange(T, dtype=np.int64)
        held, cursor = path.end.tokens, 0
        entries, moving_at, visible = (every, every * 0, every, every, path.death), every, every + 1
    else:
        lives = _ladder_lives if layer.rungs is not None else _window_lives
        entries, moving_at, visible, held, cursor = lives(layer, T, prompt)
    token, fixed, angle, birth, death = entries
    quantised = np.zeros_like(token)
    if layer.policy.quantizes:
        turn = _compacted(layer, token + 1 + layer.policy.fp16_recent, prompt, path)
        turn[token < layer.policy.fp16_sinks] = NEVER
        early, late = birth < turn, death > turn
        stack = [
            np.concatenate([x[early], y[late]])
            for x, y in [
                (token, token),
                (fixed, fixed),
                (angle, angle),
                (birth, np.maximum(birth, turn)),
                (np.minimum(death, turn), death),
            ]
        ]
        quantised = np.concatenate([quantised[early], quantised[late] + 1])
        token, fixed, angle, birth, death = stack
    at = (moving_at, visible - 1)
    return Plan(token, quantised, fixed, angle, birth, death, *at, held, cursor, path)


def _compacted(layer: LayerLayout, seen: Ints, prompt: int, path: Course | None) -> Ints:
    """Smallest compaction at or after each number of tokens seen."""
    if path is None:
        return layer.clock.first(seen, prompt)
    ends = np.append(path.compactions, NEVER)
    return ends[np.searchsorted(ends, seen)]


Entries = tuple[Ints, Ints, Ints, Ints, Ints]
Lives = tuple[Entries, Ints, Ints, Ints, int]


def _window_lives(layer: LayerLayout, T: int, prompt: int) -> Lives:
    """Oldest first, sinks never: death in closed form."""
    p = layer.policy
    token = np.arange(T, dtype=np.int64)
    death = np.full(T, NEVER, dtype=np.int64)
    if layer.target is not None:
        death = layer.clock.first(token + 1 + layer.target - p.sinks, prompt)
        death[: p.sinks] = NEVER
    fixed = (token < p.sinks).astype(np.int64)
    gone = np.searchsorted(np.sort(death), token, side="right")
    return (token, fixed, token, token, death), token, token + 1 - gone, token[death > T], p.sinks


def _ladder_lives(layer: LayerLayout, T: int, prompt: int) -> Lives:
    """Ladders laid at every compaction; a pass renumbers what the cursor has left behind."""
    p, rung, target = layer.policy, layer.rungs, layer.target
    assert rung is not None and target is not None
    open_since = np.arange(T, dtype=np.int64)
    frame = (open_since < p.sinks).astype(np.int64)
    angle = np.arange(T, dtype=np.int64)
    moving_at = np.arange(T, dtype=np.int64)
    visible = np.arange(1, T + 1, dtype=np.int64)
    rows: list[tuple[Ints, Ints, Ints, Ints, Ints]] = []

    def close(tokens: Ints, when: int) -> None:
        rows.append(
            (
                tokens,
                frame[tokens],
                angle[tokens],
                open_since[tokens],
                np.full(len(tokens), when, dtype=np.int64),
            )
        )
        open_since[tokens] = when

    live, cursor, seen = np.empty(0, dtype=np.int64), p.sinks, 0
    while True:
        full = seen + target - len(live) + 1  # compactions that find no more than the target: none
        due = int(layer.clock.first(np.array([full]), prompt)[0])
        end = min(due, T)
        live = np.concatenate([live, np.arange(seen, end, dtype=np.int64)])
        visible[seen:end] = np.arange(len(live) - (end - seen) + 1, len(live) + 1)
        seen = end
        if due > T:
            break
        blocks, after = layer.evictions.blocks(len(live), cursor)
        for start, fresh in blocks:
            if fresh:
                moved = live[start:]
                close(moved, seen)
                frame[moved], angle[moved] = 0, np.arange(start, len(live))
                angle[seen:] = moving_at[seen:] = np.arange(len(live), len(live) + T - seen)
            block = live[start : start + rung.B]
            kept = block[layer.offset : layer.offset + rung.A]
            close(block, seen)
            frame[kept], angle[kept] = 1, np.arange(start, start + rung.A)
            live = np.concatenate([live[:start], kept, live[start + rung.B :]])
        cursor = after
        if seen >= T:
            break
    close(live, NEVER)
    token, fixed, pos, birth, death = (np.concatenate(part) for part in zip(*rows, strict=True))
    if p.positions == "original":  # frames do not matter: one life a token
        token, birth = np.arange(T, dtype=np.int64), np.arange(T, dtype=np.int64)
        last = np.zeros(T, dtype=np.int64)
        for tokens, _, _, _, ends in rows:
            last[tokens] = np.maximum(last[tokens], ends)
        return (token, birth * 0, token, birth, last), moving_at, visible, live, cursor
    some = birth < death
    return (
        (token[some], fixed[some], pos[some], birth[some], death[some]),
        moving_at,
        visible,
        live,
        cursor,
    )


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
    out = q.new_empty(*q.shape[:3], v.shape[3])
    block = BLOCK if state.layer.policy.evicts else 2 * BLOCK
    for start in range(0, M, block):
        rows = slice(start, min(start + block, M))
        out[:, :, rows] = _attend(state, lives, q[:, :, rows], table, seen + start, scale, softcap)
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
    birth = torch.from_numpy(lives.birth[entries]).to(q.device)
    death = torch.from_numpy(lives.death[entries]).to(q.device)
    if not state.reindex:
        alone = lives.isolated(entries, start, stop)
        anchors = None if alone is None else torch.from_numpy(alone).to(q.device)
        return lifetime_attention.record(
            state.impls, q, k, v, birth, death, first_query=start, scale=scale, softcap=softcap,
            anchors=anchors,
        )[0]  # fmt: skip
    assert state.rotary is not None
    attend = partial(lifetime_attention.record, state.impls)
    if k.requires_grad:  # only the reference's log-sum-exp, by which frames are joined, has one
        attend = partial(lifetime_attention.run, "reference")
    k = state.rotary.turn(k, torch.from_numpy(lives.angle[entries]))
    split = int(lives.fixed[entries].sum())
    parts = []
    for part, at in ((slice(None, split), lives.fixed_at), (slice(split, None), lives.moving_at)):
        if birth[part].numel():
            turned = state.rotary.turn(q, torch.from_numpy(at[start:stop]))
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


def _leave(state: LayerState, lives: Plan, k: Tensor, v: Tensor, row: Ints) -> None:
    """Fill the store with what is held after the last token."""
    layer, policy, T = state.layer, state.layer.policy, len(row)
    compacted = _compacted(layer, lives.held + 1, state.prompt, lives.course) <= T
    low = _compacted(layer, lives.held + 1 + policy.fp16_recent, state.prompt, lives.course) <= T
    pools = np.where(low, 0, len(policy.tiers)).astype(np.uint8)
    pools[lives.held < policy.fp16_sinks] = len(policy.tiers)
    leave(state, k, v, lives.held, row, pools, int((~compacted).sum()))
    state.cursor = lives.cursor
    if lives.course is not None:
        state.sequences = lives.course.end.copy()
