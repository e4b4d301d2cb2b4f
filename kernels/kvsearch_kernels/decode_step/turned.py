"""Keys without an angle: what a token loses before it is stored, and what a slot is read with.

A policy that re-indexes positions reads every slot as if the slots that are left were the whole
text. So keys are stored without rotary angle, and turned to the index of their slot when they are
read; the model has turned the token that comes to its index in the stream, which is taken back.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvsearch_kernels.packed_attention.reference import Part, slots_of
from kvsearch_kernels.quantize_kv.reference import Packed, dequantize
from kvsearch_kernels.rotary import angles, turned


@dataclass(frozen=True)
class Turned:
    """The angles of heads that are alike.

    Attributes:
        inv_freq: angle per position of each channel pair, fp32 `[R / 2]` or per KV head
            `[H, R / 2]`.
        index: of the slots of all parts, one part after the other, int64 `[B or 1, H or 1, N]` or
            `[N]`; None where slots are numbered in that order.
        held: slots of other parts than the pool; a new one has the index after all.
        dropped: how far the stream's index of a new token is ahead of its slot's.
    """

    inv_freq: Tensor
    index: Tensor | None
    held: int
    dropped: int


def arrived(q: Tensor, k: Tensor, how: Turned, used: Tensor) -> tuple[Tensor, Tensor]:
    """Queries `[B, Hq, D]` turned to the slot of their token, and its keys `[B, H, 1, D]` to 0.

    Args:
        q: queries, turned by the model.
        k: keys, likewise.
        how: the angles.
        used: slots in use of the pool before the token `[B, H]`.
    """
    at = (how.held + used.long()).unsqueeze(-1)
    heads = q.unflatten(1, (k.shape[1], -1))  # of a group, as if they were tokens
    plain = _plain(heads, at + how.dropped, how.inv_freq)
    kind = torch.promote_types(q.dtype, torch.float32)
    query = turned(plain, *angles(at, how.inv_freq, kind)).flatten(1, 2)
    return query, _plain(k, at + how.dropped, how.inv_freq)


def _plain(x: Tensor, at: Tensor, inv_freq: Tensor) -> Tensor:
    """`x` without the angle that the model gave it at `at`."""
    waves = plain_waves(at, inv_freq, x.dtype)
    return turned(x.to(torch.promote_types(x.dtype, torch.float32)), *waves).to(x.dtype)


def plain_waves(at: Tensor, inv_freq: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine `[..., R / 2]` of taking back what a model of `dtype` did at `at` `[...]`.

    They are the model's own: products in fp32, and waves of these, rounded to `dtype`.
    """
    per_pair = inv_freq.float()
    if per_pair.dim() == 2:  # a row of its own for each head
        per_pair = per_pair.unsqueeze(-2)
    angle = at.float().unsqueeze(-1) * -per_pair
    return angle.cos().to(dtype), angle.sin().to(dtype)


def as_read(parts: Sequence[Part], how: Turned, dtype: torch.dtype) -> list[Part]:
    """`parts` with keys in `dtype`, unpacked and turned to the index of their slots."""
    found, first, kind = [], 0, torch.promote_types(dtype, torch.float32)
    for part in parts:
        keys, n = part.keys, slots_of(part)
        if isinstance(keys, Packed):
            assert part.key_format is not None
            keys = dequantize(keys, part.key_format)
        index = torch.arange(first, first + n, device=keys.device)
        if how.index is not None:
            index = how.index[..., first : first + n]
        keys = turned(keys.to(dtype), *angles(index, how.inv_freq, kind))
        found.append(Part(keys, part.values, None, part.value_format, part.lengths))
        first += n
    return found
