"""What `decode_step` attends to, and what that means."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvsearch_kernels.launch import checking
from kvsearch_kernels.quantize_kv.reference import Format, Packed, dequantize


@dataclass(frozen=True)
class Part:
    """Slots of a cache that share one format; keys and values may differ.

    Attributes:
        keys: `[B, H, N, D]` in the type of the queries (16 bits also with fp32 ones), or packed.
        values: likewise; `[B, H, N, Dv]`.
        key_format: format of packed keys; None if `keys` is a tensor.
        value_format: format of packed values; None if `values` is a tensor.
        lengths: slots in use of each batch row and head, `[B, H]` int32, the first ones; None uses
            all N.
        known: what an implementation found out about the part, for its next call. A cache hands
            over the same part for as long as its tensors stay the same.
    """

    keys: Tensor | Packed
    values: Tensor | Packed
    key_format: Format | None = None
    value_format: Format | None = None
    lengths: Tensor | None = None
    known: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        """What a copy starts from: what is known are addresses of this part's tensors."""
        return {**self.__dict__, "known": {}}


def slots_of(part: Part) -> int:
    """Slots of a part, in use or not."""
    held = part.keys.codes if isinstance(part.keys, Packed) else part.keys
    return held.shape[2]


def check_lengths(parts: Sequence[Part]) -> None:
    """Under `KVSEARCH_CHECK=1`, raise IndexError when a length is beyond its part's slots."""
    for i, part in enumerate(parts):
        if (used := part.lengths) is None or not checking():
            continue
        if bool(((used < 0) | (used > (n := slots_of(part)))).any()):
            raise IndexError(f"lengths of part {i} must be in 0 to {n}, got {used.tolist()}")


def attend(
    q: Tensor, parts: Sequence[Part], scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Attend from one query token to all slots of all parts.

    Args:
        q: queries `[B, Hq, D]`; `H` divides `Hq`. Slots carry no order: keys hold their rotation.
        parts: what is held, at most four.
        scale: factor on the dot products.
        softcap: Gemma 2's `cap * tanh(x / cap)` on the scaled products.

    Returns:
        Output `[B, Hq, Dv]` in the type of `q`, and probabilities `[B, H, G, N]` in fp32 (fp64 of
        fp64), in which all is computed; the N slots are those of all parts, one part after the
        other. With nothing held both are zero.
    """
    check_lengths(parts)
    B, Hq, D = q.shape
    kind = torch.promote_types(q.dtype, torch.float32)
    keys = _joined([_read(p.keys, p.key_format, kind) for p in parts])
    values = _joined([_read(p.values, p.value_format, kind) for p in parts])
    H = keys.shape[1]
    s = (q.to(kind) * scale).view(B, H, Hq // H, D) @ keys.transpose(-1, -2)
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    if any(p.lengths is not None for p in parts):
        held = _joined([_held(p, B, H, q.device) for p in parts]).unsqueeze(2)
        s = s.masked_fill(~held, float("-inf"))
        # slots not in use may hold anything
        values = values.masked_fill(~held.transpose(-1, -2), 0.0)
    lse = s.logsumexp(-1)
    p = (s - lse.clamp_min(torch.finfo(kind).min).unsqueeze(-1)).exp()
    return (p @ values).view(B, Hq, -1).to(q.dtype), p


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _read(held: Tensor | Packed, fmt: Format | None, kind: torch.dtype) -> Tensor:
    if isinstance(held, Packed):
        assert fmt is not None
        return dequantize(held, fmt).to(kind)
    return held.to(kind)


def _held(part: Part, B: int, H: int, device: torch.device) -> Tensor:
    """Which slots of a part are in use, `[B, H, N]`."""
    slots = torch.arange(slots_of(part), device=device)
    if part.lengths is None:
        return torch.ones(B, H, slots.shape[0], dtype=torch.bool, device=device)
    return slots < part.lengths.unsqueeze(-1)
