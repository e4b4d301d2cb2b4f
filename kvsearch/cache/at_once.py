"""Attention of all queries of a text at once: one launch a layer, however long the text.

For policies by age, and a kernel that passes over dead keys itself. Where positions are re-indexed
there are two frames (`lifetimes`): in a frame a query has one angle, and so has a key. Every query
is then asked twice, in rows of which the latter see the keys of the second frame alone, and both
answers are merged. What is made of a plan is made for the first layer, and shared by all layers
alike.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvsearch.cache.plans import Plan
from kvsearch.cache.state import LayerState
from kvsearch.cache.versions import Versions
from kvsearch.policy.schedule import Ints
from kvsearch_kernels.gather_kv import gather_kv
from kvsearch_kernels.lifetime_attention import lifetime_attention
from kvsearch_kernels.sending import sent


class Frames(NamedTuple):
    """Keys whose angles stay what they are against that of a query, frame after frame.

    Attributes:
        rows: where each key's values are, `[E]`.
        by: positions to turn each key by, `[E]`.
        birth, death: of each key, `[E]`, see `lifetime_attention`; rows of the second frame's
            queries follow those of the first.
        asked: which query each row is, `[M]` for each frame.
        at: positions to turn it by, likewise.
    """

    rows: Tensor
    by: Tensor
    birth: Tensor
    death: Tensor
    asked: Tensor
    at: Tensor


def attend(
    state: LayerState, lives: Plan, q: Tensor, table: Versions, *, scale: float,
    softcap: float | None,
) -> Tensor | None:  # fmt: skip
    """Output `[B, Hq, M, Dv]` of the queries `q` `[B, Hq, M, D]` after those that `state` has seen.

    Args:
        state: the layer; its queries and keys carry no angle where it re-indexes positions.
        lives: of all keys.
        q: the queries.
        table: values of the keys.
        scale: factor on the dot products.
        softcap: bound of the scaled products, if the model has one.

    Returns:
        None where the kernel cannot run, or a gradient is asked for.
    """
    k, v = table.parts[-1]
    if q.device.type == "cpu" or k.requires_grad:
        return None
    more: dict[str, Any] = {"first_query": state.seen, "scale": scale, "softcap": softcap}
    if state.reindex:
        return _in_frames(state, lives, q, table, more)
    birth, death, anchors = _lives(lives, table, state.seen, q)
    few = None if anchors is None else anchors[:1]
    if not _takes(q, k, v, birth, death, anchors=few, **more):
        return None
    k, v = _whole(table)
    found = lifetime_attention.record(state.impls, q, k, v, birth, death, anchors=anchors, **more)
    return found[0]


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


def _takes(q: Tensor, k: Tensor, v: Tensor, birth: Tensor, death: Tensor, **more: Any) -> bool:
    """Whether the kernel takes tensors like these, of any length."""
    few = q[:, :, :1], k[:, :, :1], v[:, :, :1], birth[:1], death[:1]
    return lifetime_attention.pick(*few, **more) == "triton"


def _whole(table: Versions) -> tuple[Tensor, Tensor]:
    """Keys and values of all rows."""
    if len(table.parts) == 1:
        return table.parts[0]
    k, v = (torch.cat([part[i] for part in table.parts], 2) for i in range(2))
    return k, v


def _lives(
    lives: Plan, table: Versions, start: int, q: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Birth, death and anchors of every row. Of rows that no query sees, none is born."""
    key = "rows", q.device, start
    if key not in lives.known:
        stop = start + q.shape[2]
        entries = lives.around(start, stop)
        rows = table.rows(lives.token[entries], lives.quantised[entries])
        alone = lives.isolated(entries, start, stop)
        size = max(last for _, last, _ in table.ranges())
        found = np.zeros((3, size), dtype=np.int64)
        found[2] = -1
        found[0, rows], found[1, rows] = lives.birth[entries], lives.death[entries]
        if alone is not None:
            found[2, rows] = alone
        made = sent(found, q.device).unbind()
        lives.known[key] = made[0], made[1], None if alone is None else made[2]
    birth, death, anchors = lives.known[key]
    return birth, death, anchors


def _in_frames(
    state: LayerState, lives: Plan, q: Tensor, table: Versions, more: dict[str, Any]
) -> Tensor | None:
    """`attend` where positions are re-indexed."""
    assert state.rotary is not None
    frames, (k, v) = _frames(lives, table, state.seen, q), table.parts[-1]
    if not _takes(q, k, v, frames.birth, frames.death, **more):
        return None
    k, v = _whole(table)
    inv_freq = state.rotary.inv_freq.to(q.device)
    turned, keys = (
        gather_kv.record(state.impls, x, rows, by=by, inv_freq=_of_heads(inv_freq, x))
        for x, rows, by in ((q, frames.asked, frames.at), (k, frames.rows, frames.by))
    )
    values = gather_kv.record(state.impls, v, frames.rows)
    out, lse = lifetime_attention.record(
        state.impls, turned, keys, values, frames.birth, frames.death, **more
    )
    return merge([*zip(out.split(q.shape[2], 2), lse.split(q.shape[2], 2), strict=True)])


def _frames(lives: Plan, table: Versions, start: int, q: Tensor) -> Frames:
    """The frames that have keys."""
    key = "frames", q.device, start
    if key not in lives.known:
        m = q.shape[2]
        stop = start + m
        entries = lives.around(start, stop)
        rows = table.rows(lives.token[entries], lives.quantised[entries])
        fixed, parts = lives.fixed[entries] > 0, list[tuple[Ints, ...]]()
        for mine, at in ((fixed, lives.fixed_at), (~fixed, lives.moving_at)):
            some, ahead = entries[mine], len(parts) * m
            birth = np.maximum(lives.birth[some], start) + ahead
            death = np.minimum(lives.death[some], stop) + ahead
            if len(some):
                ints = rows[mine], lives.angle[some], birth, death, np.arange(m), at[start:stop]
                parts.append(ints)
        lives.known[key] = Frames(
            *(sent(np.concatenate(x), q.device) for x in zip(*parts, strict=True))
        )
    frames: Frames = lives.known[key]
    return frames


def _of_heads(inv_freq: Tensor, x: Tensor) -> Tensor:
    """Angles `[R / 2]`, or of each head of `x` `[H, R / 2]` where KV heads differ."""
    if inv_freq.dim() == 1:
        return inv_freq
    return inv_freq.repeat_interleave(x.shape[1] // inv_freq.shape[0], 0)
