"""Meaning of `decode_step`: store, attend, add up; head group by head group."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvsearch_kernels.decode_step.entering import Entering, enter, in_use
from kvsearch_kernels.decode_step.turned import Turned, arrived, as_read
from kvsearch_kernels.launch import checking
from kvsearch_kernels.packed_attention.reference import Part, attend


@dataclass(frozen=True)
class Sums:
    """Where a rule adds up what slots receive; fields as in `tally`."""

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
        entering: where the token goes from the pool; None where it stays there.
    """

    parts: Sequence[Part]
    sums: Sums | None = None
    turned: Turned | None = None
    entering: Entering | None = None


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
        if (enters := heads.entering) is not None:
            parts = [in_use(parts[0], enters), pool]
        out, p = attend(query, parts, scale, softcap)
        if found is not None:
            received, sums, held = p.mean(2), found.sums, found.held
            if enters is not None:
                held = int(enters.count)
                received, sums = received[..., : held + 1], sums[..., : held + 1]
            tally(
                sums, received, found.order, pool.lengths, held=held, end=found.end,
                alpha=found.alpha, horizon=found.horizon, keep=found.keep,
            )  # fmt: skip
        if enters is not None:
            enter(heads.parts, None if found is None else found.sums, enters)
        outs.append(out)
        first = mine.stop
    return torch.cat(outs, 1)


def append(
    keys: Tensor, values: Tensor, lengths: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Write tokens behind the slots in use, in place; what does not fit is not written.

    Where they go is read on the device, so that no argument of a launch changes from step to step.

    Args:
        keys: pool `[B, H, C, D]`.
        values: pool `[B, H, C, Dv]`.
        lengths: slots in use of each batch row and head `[B, H]` int32, the first ones; afterwards
            larger by M.
        k: new keys `[B, H, M, D]`, rounded to the type of `keys`.
        v: new values `[B, H, M, Dv]`, likewise.

    Returns:
        The first three arguments.
    """
    check_room(keys, lengths, k)
    C, M = keys.shape[2], k.shape[2]
    used = lengths.long().unsqueeze(-1)
    # a token that does not fit repeats the last one that does, or what the last slot holds
    token = torch.minimum(torch.arange(M, device=k.device), (C - 1 - used).clamp_min(0))
    at, fits = (used + token).clamp_max(C - 1).unsqueeze(-1), (used < C).unsqueeze(-1)
    for pool, new in ((keys, k), (values, v)):
        rows = at.expand(new.shape)
        found = new.to(pool.dtype).gather(2, token.unsqueeze(-1).expand(new.shape))
        pool.scatter_(2, rows, torch.where(fits, found, pool.gather(2, rows)))
    return keys, values, lengths.add_(M)


def check_room(keys: Tensor, lengths: Tensor, k: Tensor) -> None:
    """Under `KVSEARCH_CHECK=1`, raise IndexError when tokens do not fit behind those held."""
    if checking() and bool((lengths + k.shape[2] > keys.shape[2]).any()):
        raise IndexError(
            f"{k.shape[2]} tokens do not fit pools of {keys.shape[2]} slots, of which "
            f"{lengths.tolist()} are in use"
        )


def tally(
    sums: Tensor,
    received: Tensor,
    order: Tensor | None,
    lengths: Tensor,
    *,
    held: int,
    end: int = 0,
    alpha: float = 0.0,
    horizon: int | None = None,
    keep: float = 1.0,
) -> Tensor:
    """Add what slots received from one token to `sums`, in place.

    The token's weight is `n^alpha` with `n = held + lengths`, the slots that it sees; with a
    horizon it is 0 for tokens that as many others, or more, follow before the length is `end`. The
    length is read on the device, so that no argument of a launch changes from token to token.

    Args:
        sums: `[B, V, N]` fp32 in order of time, as a view of memory whose last axis is contiguous;
            `V` is the KV heads, or 1, and then they are averaged.
        received: `[B, H, N]` of the slots, one part after the other.
        order: where there the slots in order of time are, `[N]` or `[B or 1, V or 1, N]`; None if
            they are in that order.
        lengths: slots in use of the last part `[B, H]` int32, alike in all heads.
        held: slots of the other parts.
        end: length of the last part at the next compaction; read with a horizon alone.
        alpha: power of the number of slots seen.
        horizon: last tokens before a compaction that count; None is all.
        keep: factor on the sums before (a decay).

    Returns:
        `sums`.
    """
    if keep != 1.0:
        sums.mul_(keep)
    if order is not None:
        received = _picked(received, order)
    weight = weight_of(lengths, held, end, alpha, horizon)
    if weight is not None:
        received = received * weight
    if sums.shape[1] == 1:
        received = received.mean(1, keepdim=True)
    return sums.add_(received)


def _picked(received: Tensor, order: Tensor) -> Tensor:
    if order.dim() == 1:
        return received.index_select(-1, order)
    return received.gather(-1, order.expand(received.shape))


def weight_of(
    lengths: Tensor, held: int, end: int, alpha: float, horizon: int | None
) -> Tensor | None:
    """The token's weight `[1]` fp32, or None if it is 1 always."""
    if alpha == 0 and horizon is None:
        return None
    used = lengths.flatten()[:1]
    visible = (used + held).float()
    weight = visible if alpha == 1 else visible**alpha
    return weight if horizon is None else weight * (end - used < horizon)


def why_not_alike(stores: Stores) -> str | None:
    """Reason why keys of a layer cannot all be turned, or all left, in one way."""
    turned = {None if h.turned is None else h.turned.inv_freq.shape[-1] for h in stores.heads}
    if len(turned) > 1:
        return "as many channels must be turned in all heads of a layer, or none"
    return None
