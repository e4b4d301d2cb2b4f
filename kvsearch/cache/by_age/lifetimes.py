"""One pass over a text for policies that decide by age alone: every key has a life, not a mask.

Without scores the schedule is known in advance. A key is an entry that queries `birth <= i < death`
see; a key that is quantised at a compaction is two entries, one before and one after. Re-indexed
positions need two frames: keys behind the ladder's cursor keep their slot (`fixed`), keys ahead of
it all move together with the query (`moving`), so inside each frame one rotation serves many steps.

A token has its 16-bit value, and where the policy quantises, the value that its tier reads back.
What is in the tier already has only the latter. After the pass the store is left as the stream
would leave it: what it held and still holds moves as it is, and only new tokens are encoded.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvsearch.cache.by_age.plans import Plan, applies, compacted, plan
from kvsearch.cache.call import Call
from kvsearch.cache.head_group import HeadGroup
from kvsearch.cache.layer import Layer
from kvsearch.cache.slots.formats import straight
from kvsearch.policy.schedule import Ints
from kvsearch_kernels.host_to_device import sent
from kvsearch_kernels.lifetime_attention import lifetime_attention

BLOCK = 128  # queries that share one gather of the keys alive around them
LEAST = 16  # tokens for which a plan is made anew


def serves(layer: Layer, call: Call) -> bool:
    """Whether one pass is the way: for the first tokens, or for several across a compaction."""
    if call.count == 1 or not all(applies(group.layout.policy) for group in layer.groups):
        return False
    due = layer.next_compaction(call.seen)
    crosses = due is not None and call.end > due
    return call.seen == 0 or (call.count >= LEAST and crosses)


def run(layer: Layer, call: Call) -> Tensor:
    """Attend over many tokens, and leave all heads as the stream would."""
    out = layer.each(call, partial(_run, layer))
    layer.seen = call.end
    layer.note_peak(call.end)
    return out


def _run(layer: Layer, group: HeadGroup, call: Call) -> Tensor:
    """`run` in one group of heads."""
    call = group.arriving(call)
    flags = None if layer.stream is None else layer.stream.flags(0, call.end)
    lives = plan(group.layout, call.end, layer.prompt, flags)
    table = versions(group, lives.before(call.seen), call)
    if _skips_dead_keys(call):
        out = _attend(group, lives, call, table)
    else:
        out, block = call.room(), BLOCK
        if not group.layout.policy.evicts:
            block = 2 * BLOCK
        for start in range(0, call.count, block):
            now = slice(start, min(start + block, call.count))
            out[:, :, now] = _attend(group, lives, call.tokens(now), table)
    if layer.whole is None:
        leave(group, lives, call, layer.prompt, table.row)
    return out


def _skips_dead_keys(call: Call) -> bool:
    """Whether one launch serves all queries: the kernel passes over blocks of dead keys itself."""
    if call.q.device.type == "cpu" or call.k.requires_grad:
        return False
    life, one = torch.empty(1, dtype=torch.long, device=call.q.device), call.tokens(slice(1))
    asked = (one.q, one.k, one.v, life, life)
    return lifetime_attention.pick(*asked, first_query=0, **call.how) == "triton"


@dataclass(frozen=True, eq=False)
class Versions:
    """Both values of each token.

    Attributes:
        keys, values: `[B, H, R, D]` of the slots as they are read back, of the new tokens in 16
            bits, and quantised ones of those that are still in 16 bits.
        row: first row of each token of the stream `[T]`; -1 where it is gone.
        low: row of its quantised value `[T]`.
    """

    keys: Tensor
    values: Tensor
    row: Ints
    low: Ints

    def rows(self, tokens: Ints, quantised: Ints) -> Ints:
        """Rows of some tokens, each with or without its rounding."""
        return np.where(quantised > 0, self.low[tokens], self.row[tokens])

    def take(self, rows: Ints) -> tuple[Tensor, Tensor]:
        """Keys and values `[B, H, E, D]` of some rows."""
        first, stop = int(rows[0]), int(rows[-1]) + 1
        if stop - first == len(rows) and (rows == np.arange(first, stop)).all():
            return self.keys[:, :, first:stop], self.values[:, :, first:stop]
        return _some(self.keys, self.values, rows)


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


def _attend(group: HeadGroup, lives: Plan, call: Call, table: Versions) -> Tensor:
    """Attention of one block of queries over the keys that are alive around it."""
    q, first, scale, softcap = call.q, call.seen, call.scale, call.softcap
    keys = _entries(lives, table, first, call.end, q.device)
    k, v = table.take(keys.rows)
    attend = partial(lifetime_attention.record, group.impls, scale=scale, softcap=softcap,
                     first_query=first)  # fmt: skip
    if not group.reindex:
        return attend(q, k, v, keys.birth, keys.death, anchors=keys.anchors)[0]
    assert group.rotary is not None
    if k.requires_grad:  # only the reference's log-sum-exp, by which frames are joined, has one
        attend = partial(lifetime_attention.run, "reference", scale=scale, softcap=softcap,
                         first_query=first)  # fmt: skip
    k = group.rotary.turn(k, keys.angle)
    return merge([
        attend(group.rotary.turn(q, at), k[:, :, part], v[:, :, part], birth, death)
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


def versions(group: HeadGroup, held: Ints, call: Call) -> Versions:
    """Values of what `group` holds and of the tokens that come.

    Args:
        group: of a policy with one tier that decides by age.
        held: tokens in its slots `[N]`.
        call: brings keys and values that are rounded to 16 bits.
    """
    k, v, seen, n, m = call.k, call.v, call.seen, len(held), call.count
    assert group.store.n == n, (group.store.n, n)
    T, parts = seen + m, [(k, v)]
    row = np.full(T, -1, dtype=np.int64)
    row[held], row[seen:] = np.arange(n), np.arange(n, n + m)
    low = row
    if n:
        parts.insert(0, group.store.read())
    if group.layout.policy.quantizes:
        kc, vc = group.codecs[0]
        together = kc.fmt.group if kc.fmt is not None and kc.along_tokens else 1
        first = untouched(group)
        fresh_k, fresh_v = k.detach(), v.detach()
        if n > first:
            fresh_k, fresh_v = (
                torch.cat([old[:, :, first:], x], 2)
                for old, x in zip(parts[0], (fresh_k, fresh_v), strict=True)
            )
        # of an unfinished group no token is quantised before the end
        whole = (T - (seen - n + first)) // together * together
        low_k = kc.read_back(fresh_k[:, :, :whole], group.impls)
        low_v = vc.read_back(fresh_v, group.impls)
        if whole < fresh_k.shape[2]:
            low_k = torch.cat([low_k, fresh_k[:, :, whole:]], 2)
        parts.append((low_k, low_v) if n else (straight(low_k, k), straight(low_v, v)))
        low = np.where(row >= first, row + n + m - first, row)
    keys, values = (x[0] if len(x) == 1 else torch.cat(x, 2) for x in zip(*parts, strict=True))
    return Versions(keys, values, row, low)


def untouched(group: HeadGroup) -> int:
    """First slot behind the tier: those from here on are in 16 bits, and may enter the tier."""
    compacted = group.store.n - group.store.residual
    sinks = min(group.layout.policy.fp16_sinks, compacted)
    return sinks + group.layout.tier_counts(compacted)[0]


def leave(group: HeadGroup, lives: Plan, call: Call, prompt: int, row: Ints) -> None:
    """Let the store hold what is held after the new tokens, whatever it held before them.

    Args:
        group: as before the new tokens.
        lives: of all tokens.
        call: brings keys and values in 16 bits.
        prompt: how many of all tokens belong to the prompt.
        row: where each token is among the slots before and the new tokens, see `Versions`.
    """
    layout, policy, held, T = group.layout, group.layout.policy, lives.held, len(row)
    old = compacted(layout, held + 1, prompt, lives.course) <= T
    low = compacted(layout, held + 1 + policy.fp16_recent, prompt, lives.course) <= T
    sinks, residual = policy.fp16_sinks, int((~old).sum())  # the last saw no compaction: all new
    k, v, in_tier = call.k, call.v, low & (held >= sinks)
    pools = np.where(in_tier, 0, len(policy.tiers)).astype(np.uint8)
    key = "pools", k.device, T, pools.tobytes()  # policies may behave alike in unlike pools
    if key not in lives.known:
        lives.known[key] = sent(pools, k.device)
    at: Tensor = lives.known[key]
    group.cursor = lives.cursor
    if lives.course is not None:
        group.sequences = lives.course.end.copy()
    store, grouped, count = group.store, group.codecs[0][0].along_tokens, int(in_tier.sum())
    if call.seen == 0 or (grouped and count and row[held[sinks]] >= untouched(group)):
        # nothing that is held has been quantised before
        lead = -count % (policy.quantizer.group or 1) if grouped else 0
        if lead:  # gone, but they share the first scales
            before = np.arange(held[sinks] - lead, held[sinks])
            held = np.concatenate([held[:sinks], before, held[sinks:]])
        if call.seen:
            k, v = (torch.cat([old, x], 2) for old, x in zip(store.read(), (k, v), strict=True))
        store.load(*_some(k, v, row[held]), at, residual, lead)
        return
    rows, n = row[held], store.n
    seen = rows[: len(rows) - residual]
    fresh = seen[seen >= n] - n
    if grouped:  # of these nothing has left the tier
        fresh = np.arange(len(fresh))
    keep = np.concatenate([seen[seen < n], n + np.arange(len(fresh))])
    if len(fresh):
        store.append(*_some(k, v, fresh))
    store.compact(sent(keep, k.device), at[: len(seen)])
    if residual:
        store.append(*_some(k, v, rows[len(seen) :] - n))


def _some(k: Tensor, v: Tensor, tokens: Ints) -> tuple[Tensor, Tensor]:
    if len(tokens) == k.shape[2] and (tokens == np.arange(len(tokens))).all():
        return k, v
    index = sent(tokens, k.device)
    return k.index_select(2, index), v.index_select(2, index)
