"""When every key of a text is seen, for policies that decide by age: known before the text is.

A key is an entry that queries `birth <= i < death` see; a key that is quantised at a compaction is
two entries, one before and one after.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvsearch.policy import LayerLayout, Policy
from kvsearch.policy.schedule import NEVER, Ints
from kvsearch.policy.sequences import Course, Flags, course


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
        known: tensors made of the plan, by what they are for: all layers alike share it.
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
    known: dict[tuple[object, ...], Any] = field(default_factory=dict, repr=False)

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
        turn = compacted(layer, token + 1 + layer.policy.fp16_recent, prompt, path)
        turn[token < layer.policy.fp16_sinks] = NEVER
        early, late = birth < turn, death > turn
        before = token, fixed, angle, birth, np.minimum(death, turn), quantised
        after = token, fixed, angle, np.maximum(birth, turn), death, quantised + 1
        token, fixed, angle, birth, death, quantised = (
            np.concatenate([x[early], y[late]]) for x, y in zip(before, after, strict=True)
        )
    at = (moving_at, visible - 1)
    return Plan(token, quantised, fixed, angle, birth, death, *at, held, cursor, path)


def compacted(layer: LayerLayout, seen: Ints, prompt: int, path: Course | None) -> Ints:
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
    every = np.arange(T, dtype=np.int64)
    open_since, angle, moving_at, visible = every.copy(), every.copy(), every.copy(), every + 1
    frame = (every < p.sinks).astype(np.int64)
    rows: list[tuple[Ints, Ints, Ints, Ints, Ints]] = []

    def close(tokens: Ints, when: int) -> None:
        ends = np.full(len(tokens), when, dtype=np.int64)
        rows.append((tokens, frame[tokens], angle[tokens], open_since[tokens], ends))
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
        last = np.zeros(T, dtype=np.int64)
        for tokens, _, _, _, ends in rows:
            last[tokens] = np.maximum(last[tokens], ends)
        return (every, every * 0, every, every, last), moving_at, visible, live, cursor
    some = birth < death
    entries = token[some], fixed[some], pos[some], birth[some], death[some]
    return entries, moving_at, visible, live, cursor
