"""Implementation of `decode_step` for a CPU: one call for a layer; importing it imports no numba.

What each op costs before its loop starts is more than the loop, where the heads of a layer are
stored apart. Here a layer is described once, as rows of integers, and the description serves until
its next compaction.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvsearch_kernels.decode_step.entering import Entering
from kvsearch_kernels.decode_step.reference import Heads, Stores, why_not_alike
from kvsearch_kernels.decode_step.turned import Turned, plain_waves
from kvsearch_kernels.launch import checking
from kvsearch_kernels.numba_args import KINDS, Integers, slots_at, why_not_memory
from kvsearch_kernels.packed_attention.numba_parts import row_of_part, why_not_parts
from kvsearch_kernels.packed_attention.reference import check_lengths, slots_of

__all__ = ["forward", "why_not"]

NEVER = 1 << 62  # a horizon that nothing reaches


def why_not(
    q: Tensor, k: Tensor, v: Tensor, stores: Stores, *, scale: float, softcap: float | None = None,
) -> str | None:  # fmt: skip
    """Reason why these arguments cannot be taken, or None."""
    if reason := why_not_memory(q, k, v):
        return reason
    asked = (q.shape, q.dtype, k.shape, v.shape)
    if stores.known.get("taken by numba") == asked:
        return None
    if k.shape[:3] != v.shape[:3] or k.dim() != 4 or k.shape[2] != 1:
        return f"k and v must be one token [B, H, 1, D], got {tuple(k.shape)}, {tuple(v.shape)}"
    if q.dim() != 3 or (q.shape[0], q.shape[2]) != (k.shape[0], k.shape[3]):
        return f"q must be [B, Hq, D] like k {tuple(k.shape)}, got {tuple(q.shape)}"
    first, group = 0, q.shape[1] // max(1, k.shape[1])
    for heads in stores.heads:
        count = _count(heads)
        mine = q[:, first * group : (first + count) * group]
        if reason := why_not_parts(mine, heads.parts, softcap) or _why_not(heads, mine, v):
            return reason
        first += count
    if first != k.shape[1]:
        return f"stores of {first} KV heads do not take {k.shape[1]}"
    if reason := why_not_alike(stores):
        return reason
    if len({heads.parts[-1].keys.dtype for heads in stores.heads}) > 1:  # type: ignore[union-attr]
        return "the last parts of all heads must be of one type"
    stores.known["taken by numba"] = asked
    return None


def _why_not(heads: Heads, q: Tensor, v: Tensor) -> str | None:
    """Reason why a token cannot be stored in these heads, or counted there."""
    pool, found = heads.parts[-1], heads.sums
    if heads.turned is not None and (reason := _why_not_turned(heads.turned)):
        return reason
    if heads.entering is not None and (reason := _why_not_entering(heads, heads.entering)):
        return reason
    if not isinstance(pool.keys, Tensor) or not isinstance(pool.values, Tensor):
        return "the last part must be in 16 bits"
    if pool.lengths is None or pool.lengths.dtype is not torch.int32:
        return "the last part must have int32 lengths"
    if not pool.lengths.is_contiguous() or pool.keys.dtype is not pool.values.dtype:
        return "lengths must be contiguous, and keys and values of one type"
    if pool.values.shape[3] != v.shape[3]:
        return f"values must have {pool.values.shape[3]} channels, got {v.shape[3]}"
    if found is None:
        return None
    if found.sums.dtype is not torch.float32 or q.dtype is torch.float64:
        return f"sums of {q.dtype} attention are kept in fp32 only"
    B, H, slots = *pool.keys.shape[:2], sum(map(slots_of, heads.parts))
    got = tuple(found.sums.shape)
    if len(got) != 3 or got[0] != B or got[1] == 0 or H % got[1] or got[2] > slots:
        return f"sums must be [{B}, {H} or 1, {slots} or fewer], got {got}"
    return why_not_memory(found.sums, *([] if found.order is None else [found.order]))


def _why_not_entering(heads: Heads, how: Entering) -> str | None:
    """Reason why a token cannot enter the tier of these heads, or None."""
    if len(heads.parts) != 2 or heads.turned is not None:
        return "tokens enter the only tier beside the pool, and their keys have the model's angle"
    tier = heads.parts[0]
    for fmt in (tier.key_format, tier.value_format):
        if fmt is not None and (fmt.levels != "uniform" or fmt.bits < 2 or fmt.along == "tokens"):
            return f"there is no loop by which tokens enter a tier of {fmt}"
    if how.count.dtype is not torch.int64 or how.count.shape != (1,):
        return f"count must be [1] int64, got {tuple(how.count.shape)} {how.count.dtype}"
    both = [x for x in (how.born, how.divisors) if x is not None]
    if how.born is not None and how.born.dtype is not torch.int32:
        return f"births must be int32, got {how.born.dtype}"
    return why_not_memory(how.count, *both)


def _why_not_turned(how: Turned) -> str | None:
    """Reason why keys cannot be turned to their slots, or None."""
    if how.inv_freq.dim() != 1:
        return "there is no loop for angles of each head"
    if how.inv_freq.dtype is not torch.float32:
        return f"angles must be float32, got {how.inv_freq.dtype}"
    return why_not_memory(how.inv_freq, *([] if how.index is None else [how.index]))


def forward(
    q: Tensor, k: Tensor, v: Tensor, stores: Stores, *, scale: float, softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """As `reference`."""
    from kvsearch_kernels.numba_loops.step import step, step_at

    if checking():
        for heads in stores.heads:
            check_lengths(heads.parts)
    parts, rows, numbers, dtype, _held = _known_rows(stores)
    turned, B, Hq, D = stores.heads[0].turned is not None, *q.shape
    H, width = v.shape[1], v.shape[3]
    if dtype is torch.float16 and not turned and all(map(_plain, (q, k, v))):
        out = torch.empty(B, Hq, width, dtype=torch.float32, device="cpu")
        at = (x.data_ptr() for x in (q, k, v, out))
        shape = (B, H, Hq // H, D, width)
        step_at(*at, shape, parts, rows, numbers, float(scale), float(softcap or 0.0))
        return out
    kind = torch.float64 if q.dtype is torch.float64 else torch.float32
    out = torch.empty(B, Hq, width, dtype=kind, device="cpu")
    query = q.detach()
    if turned:
        from kvsearch_kernels.numba_loops.turning import arrive

        query, key = (x.detach().to(kind, copy=True) for x in (q.contiguous(), k.contiguous()))
        waves = _waves(stores, q.dtype, k.dtype, B)
        arrive(query.numpy(), key.squeeze(2).numpy(), waves, parts, rows)
        k = key.to(k.dtype)
    new = (x.to(dtype).contiguous().view(torch.uint8).numpy() for x in (k, v))
    step(
        query.to(kind).contiguous().numpy(), *new, parts, rows, numbers, float(scale),
        float(softcap or 0.0), kind is torch.float64, out.numpy(),
    )  # fmt: skip
    return out.to(q.dtype)


def _known_rows(stores: Stores) -> tuple[Any, ...]:
    if "rows of numba" not in stores.known:
        stores.known["rows of numba"] = _rows(stores)
    found: tuple[Any, ...] = stores.known["rows of numba"]
    return found


def joined(several: Sequence[Stores], before: Stores | None) -> Stores:
    """Stores of sequences, of one batch row each, as heads of one: integers are put side by side.

    Tensors stay with the stores that they are of, unless keys are turned.

    Args:
        several: a layer's, of each sequence.
        before: what this returned for the token before, which serves as long as nothing has moved.
    """
    each = [_known_rows(stores) for stores in several]
    turned = several[0].heads[0].turned is not None
    if before is not None and not turned:
        known = before.known["joined"]
        if len(known) == len(each) and all(a is b[1] for a, b in zip(known, each, strict=True)):
            return before
    parts, rows, numbers = (np.concatenate([x[i] for x in each]) for i in range(3))
    sizes = np.array([len(x[0]) for x in each])
    rows[:, :2] += np.repeat(np.cumsum(sizes) - sizes, [len(x[1]) for x in each])[:, None]
    heads = [h for stores in several for h in stores.heads] if turned else several[0].heads[:1]
    made = Stores(heads, {})
    made.known["rows of numba"] = parts, rows, numbers, each[0][3], ()
    made.known["joined"] = [x[1] for x in each]
    return made


def _plain(x: Tensor) -> bool:
    """Whether a loop can read fp32 numbers one after the other."""
    return x.dtype is torch.float32 and x.is_contiguous()


def _count(heads: Heads) -> int:
    pool = heads.parts[-1].keys
    return pool.shape[1] if isinstance(pool, Tensor) else pool.codes.shape[1]


def _rows(stores: Stores) -> tuple[object, ...]:
    """Rows of the parts, of the heads, and what the rows point to."""
    parts: list[Integers] = []
    rows, numbers, held = [], [], list[object]()  # `held`: what rows point to
    for heads in stores.heads:
        found, first = heads.sums, len(parts)
        parts += [row_of_part(part) for part in heads.parts]
        row = [first, len(parts), _count(heads)]
        if found is None:
            row, number = [*row, *[0] * 12], [0.0, 1.0]
        else:
            B, V, _ = found.sums.shape
            order, whole = slots_at(found.order, B, V)
            horizon = NEVER if found.horizon is None else found.horizon
            at = (found.sums.data_ptr(), *found.sums.stride()[:2], V, found.sums.shape[2])
            row, number = [*row, *at, *order, found.held, found.end, horizon], [
                found.alpha, found.keep,
            ]  # fmt: skip
            held.append(whole)
        rows.append([*row, *_turns(heads, held), *_entering(heads.entering)])
        numbers.append(number)
    pool = stores.heads[0].parts[-1].keys
    assert isinstance(pool, Tensor) and pool.dtype in KINDS
    table, integers = np.array(parts), np.array(rows, dtype=np.int64)
    return table, integers, np.array(numbers), pool.dtype, (held, stores.heads)


def _turns(heads: Heads, held: list[object]) -> tuple[int, ...]:
    """How keys are turned, see `numba_loops.rows`."""
    from kvsearch_kernels.numba_loops.rows import FINE, TURN

    how = heads.turned
    if how is None:
        return (0,) * TURN
    pool = heads.parts[-1].keys
    assert isinstance(pool, Tensor)
    at, whole = slots_at(how.index, *pool.shape[:2])
    most = sum(map(slots_of, heads.parts)) if how.index is None else int(how.index.max()) + 1
    freq = how.inv_freq.contiguous()
    table = angles(freq.numpy().tobytes(), 1 << (most // FINE).bit_length())
    held += [whole, table]
    return (table.ctypes.data, freq.shape[0], *at, how.held)


def _entering(how: Entering | None) -> tuple[int, ...]:
    """Where a token enters a tier, see `numba_loops.rows`."""
    from kvsearch_kernels.numba_loops.rows import ENTER

    if how is None:
        return (0,) * ENTER
    target = NEVER if how.target is None else how.target
    numbers = (how.count.data_ptr(), target, how.sinks, how.recent, int(how.forgets))
    born = (0, 0, 0) if how.born is None else (how.born.data_ptr(), *how.born.stride()[:2])
    return (*numbers, *born, 0 if how.divisors is None else how.divisors.data_ptr())


def _waves(stores: Stores, query: torch.dtype, key: torch.dtype, batch: int) -> NDArray[np.float64]:
    """What takes back the model's angle, `[B, H, 2, 2, R / 2]`, see `turning.arrive`."""
    found = []
    for heads in stores.heads:
        how, lengths = heads.turned, heads.parts[-1].lengths
        assert how is not None and lengths is not None
        freq = how.inv_freq.numpy().tobytes()
        at = [n + how.held + how.dropped for n in lengths.flatten().tolist()]
        each = [[back(freq, p, query), back(freq, p, key)] for p in at]
        found.append(np.array(each).reshape(batch, -1, 2, *each[0][0].shape))
    return np.concatenate(found, 1)


@lru_cache(maxsize=64)
def back(inv_freq: bytes, position: int, dtype: torch.dtype) -> NDArray[np.float64]:
    """Cosine and sine `[2, R / 2]` of `turned.plain_waves`; one token's are those of all layers."""
    freq = torch.frombuffer(bytearray(inv_freq), dtype=torch.float32)
    return (
        torch.stack(plain_waves(torch.tensor(position, device="cpu"), freq, dtype)).double().numpy()
    )


@lru_cache(maxsize=64)
def angles(inv_freq: bytes, more: int) -> NDArray[np.float64]:
    """Cosine and sine `[positions, 2, pairs]` of 0 to FINE - 1, then of `more` multiples of FINE.

    All layers and tokens share them: a model has one set of angles, or a few.
    """
    from kvsearch_kernels.numba_loops.rows import FINE

    at = np.concatenate([np.arange(FINE), FINE * np.arange(more)])
    angle = at[:, None] * np.frombuffer(inv_freq, np.float32).astype(np.float64)
    return np.stack([np.cos(angle), np.sin(angle)], 1)
