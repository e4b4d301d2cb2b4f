"""Meaning of `decode_attention`."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvsearch_kernels.quantize_kv.reference import Format, Packed, dequantize


@dataclass(frozen=True)
class Part:
    """Slots of a cache that share one format; keys and values may differ.

    Attributes:
        keys: `[B, H, N, D]` in the type of the queries, or packed.
        values: likewise; their head size is that of the keys.
        key_format: format of packed keys; None if `keys` is a tensor.
        value_format: format of packed values; None if `values` is a tensor.
        lengths: slots in use of each batch row and head, `[B, H]` int32, the first ones; None uses
            all N.
    """

    keys: Tensor | Packed
    values: Tensor | Packed
    key_format: Format | None = None
    value_format: Format | None = None
    lengths: Tensor | None = None


def _read(held: Tensor | Packed, fmt: Format | None, kind: torch.dtype) -> Tensor:
    if isinstance(held, Packed):
        assert fmt is not None
        return dequantize(held, fmt).to(kind)
    return held.to(kind)


def reference(
    q: Tensor, parts: Sequence[Part], *, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attend from one query token to all slots of all parts.

    Args:
        q: queries `[B, Hq, D]`; `H` divides `Hq`. Slots carry no order: keys hold their rotation.
        parts: what is held, at most four.
        scale: factor on the dot products.
        softcap: Gemma 2's `cap * tanh(x / cap)` on the scaled products.

    Returns:
        Output `[B, Hq, D]` in the type of `q` and log-sum-exp `[B, Hq]` in fp32 (fp64 of fp64);
        computed in fp32. With nothing held the output is zero, the log-sum-exp minus infinity.
    """
    B, Hq, D = q.shape
    kind = torch.promote_types(q.dtype, torch.float32)
    keys = torch.cat([_read(p.keys, p.key_format, kind) for p in parts], 2)
    values = torch.cat([_read(p.values, p.value_format, kind) for p in parts], 2)
    H = keys.shape[1]
    held = torch.cat([_held(p, B, H, q.device) for p in parts], -1).unsqueeze(2)
    s = (q.to(kind) * scale).view(B, H, Hq // H, D) @ keys.transpose(-1, -2)
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    s = s.masked_fill(~held, float("-inf"))
    lse = s.logsumexp(-1)
    p = (s - lse.clamp_min(torch.finfo(kind).min).unsqueeze(-1)).exp()
    # slots not in use may hold anything
    out = p @ values.masked_fill(~held.transpose(-1, -2), 0.0)
    return out.view(B, Hq, D).to(q.dtype), lse.view(B, Hq)


def _held(part: Part, B: int, H: int, device: torch.device) -> Tensor:
    """Which slots of a part are in use, `[B, H, N]`."""
    held = part.keys.codes if isinstance(part.keys, Packed) else part.keys
    slots = torch.arange(held.shape[2], device=device)
    if part.lengths is None:
        return torch.ones(B, H, held.shape[2], dtype=torch.bool, device=device)
    return slots < part.lengths.unsqueeze(-1)
