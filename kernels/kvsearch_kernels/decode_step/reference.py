"""Meaning of `decode_step`: store, attend, add up; head group by head group."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvsearch_kernels.decode_attention.reference import Part, attend
from kvsearch_kernels.decode_step.append import append
from kvsearch_kernels.decode_step.tally import tally
from kvsearch_kernels.decode_step.turned import Turned, arrived, as_read
from kvsearch_kernels.room import Room, kept


@dataclass(frozen=True)
class Sums:
    """Where a rule adds up what slots receive; fields as in `tally.tally`."""

    sums: Tensor
    order: Tensor | None
    held: int
    end: int
    alpha: float
    horizon: int | None
    keep: float


@dataclass(frozen=True)
class Heads:
    """KV heads of a layer that are alike in slots and formats.

    Attributes:
        parts: what they hold. The last one is a pool in 16 bits with room for the token, and has
            lengths.
        sums: of their rule, or None if nobody asks what slots receive.
        turned: of keys that carry no angle; None where they have the model's.
    """

    parts: Sequence[Part]
    sums: Sums | None = None
    turned: Turned | None = None


@dataclass(frozen=True)
class Stores:
    """All heads of a layer, in order.

    Attributes:
        heads: those that are alike go together.
        kept: what an implementation keeps of a layer on the device. Whoever describes the layer
            anew, as after a compaction, hands it on, so that it lies where it lay.
        known: what an implementation found out about them, for its next call.
    """

    heads: Sequence[Heads]
    kept: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    known: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)


def reference(
    q: Tensor, k: Tensor, v: Tensor, stores: Stores, *, scale: float, softcap: float | None = None,
    room: Room | None = None,
) -> Tensor:  # fmt: skip
    """Put a token behind those in use, attend from it, and add up what every slot received.

    Args:
        q: queries `[B, Hq, D]`.
        k: the token's keys `[B, H, 1, D]`, in the type of the pools or in the model's, in which
            they are turned back where keys carry no angle.
        v: its values `[B, H, 1, Dv]`, likewise. Both are rounded when they are stored.
        stores: of the layer's heads; pools, lengths and sums are written to.
        scale: factor on the dot products.
        softcap: Gemma 2's `cap * tanh(x / cap)` on the scaled products.
        room: where the output lies, until the next call with the same one; None takes fresh memory.

    Returns:
        Output `[B, Hq, Dv]` in the type of `q`.
    """
    outs, first, group = [], 0, q.shape[1] // k.shape[1]
    for heads in stores.heads:
        pool = heads.parts[-1]
        assert isinstance(pool.keys, Tensor) and isinstance(pool.values, Tensor)
        assert pool.lengths is not None
        mine = slice(first, first + pool.keys.shape[1])
        query, key = q[:, mine.start * group : mine.stop * group], k[:, mine]
        how, found = heads.turned, heads.sums
        if how is not None:
            query, key = arrived(query, key, how, pool.lengths)
        new = (x.to(pool.keys.dtype) for x in (key, v[:, mine]))
        append(pool.keys, pool.values, pool.lengths, *new)
        parts = heads.parts if how is None else as_read(heads.parts, how, q.dtype)
        out, _, p = attend(query, parts, scale, softcap)
        if found is not None:
            tally(
                found.sums, p.mean(2), found.order, pool.lengths, held=found.held, end=found.end,
                alpha=found.alpha, horizon=found.horizon, keep=found.keep,
            )  # fmt: skip
        outs.append(out)
        first = mine.stop
    return kept(room, "out", torch.cat(outs, 1))


def why_not_alike(stores: Stores) -> str | None:
    """Reason why keys of a layer cannot all be turned, or all left, in one way."""
    turned = {None if h.turned is None else h.turned.inv_freq.shape[-1] for h in stores.heads}
    if len(turned) > 1:
        return "as many channels must be turned in all heads of a layer, or none"
    return None
