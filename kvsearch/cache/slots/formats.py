"""Which storage formats the pools of one layer use."""

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvsearch.policy import LayerLayout
from kvsearch_kernels.codebooks import CODEBOOKS
from kvsearch_kernels.gather_kv import gather_kv
from kvsearch_kernels.quantize_kv import (
    Format,
    Packed,
    dequantize_kv,
    fake_quantize,
    quantize_kv,
)
from kvsearch_kernels.settle_kv import settle_kv

Held = tuple[Tensor, ...]
Along = Literal["channels", "tokens"]
Ran = MutableMapping[str, str]  # op -> the implementation of it that ran


@dataclass(frozen=True)
class Codec:
    """Stores vectors `[..., D]` in one format; `fmt` None keeps the 16-bit type `native`."""

    fmt: Format | None
    native: torch.dtype

    def fake(self, x: Tensor) -> Tensor:
        """The values that come back after storing `x`, in the type of `x`."""
        if self.fmt is None:
            return x.to(self.native).to(x.dtype)
        return fake_quantize(x, self.fmt).to(x.dtype)

    def encode(self, x: Tensor, ran: Ran, slots: Tensor | None = None) -> Held:
        """The tensors that are really held of `x` `[B, H, N, D]`, or of its `slots`."""
        if self.fmt is None:
            kept = x if slots is None else gather_kv.record(ran, x, slots)
            return (kept.to(self.native),)
        return as_held(quantize_kv.record(ran, x, self.fmt, slots=slots))

    @property
    def along_tokens(self) -> bool:
        """Whether neighbouring tokens share scales."""
        return self.fmt is not None and self.fmt.along == "tokens"

    def decode(self, held: Held, dtype: torch.dtype, ran: Ran, lead: int = 0) -> Tensor:
        """Values of held tensors, see `packed`."""
        found = self.packed(held, lead)
        if isinstance(found, Tensor):
            return found.to(dtype)
        assert self.fmt is not None
        return dequantize_kv.record(ran, found, self.fmt, dtype=dtype)

    def packed(self, held: Held, lead: int = 0) -> Tensor | Packed:
        """Held tensors as the ops name them; `lead` tokens of the first group have been dropped."""
        if self.fmt is None:
            return held[0]
        codes, numbers = held[0], self.fmt.numbers
        if not numbers:
            return Packed(codes, codes.new_empty((*codes.shape[:-1], 1, 0), dtype=torch.float16))
        scales = held[1].unflatten(-1, (held[1].shape[-1] // numbers, numbers))
        return Packed(codes, scales, lead if self.along_tokens else 0)


def read_back(
    tier: tuple[Codec, Codec], k: Tensor, v: Tensor, ran: Ran
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Keys and values `[B, H, N, D]` that come back after storing them in a tier.

    On a GPU that is one launch for both.
    """
    kc, vc = tier
    if k.device.type == "cpu" or kc.along_tokens:
        return kc.fake(k), vc.fake(v)
    pools = torch.arange(2, dtype=torch.uint8, device=k.device).unsqueeze(-1)
    into, out = pools.expand(2, k.shape[2]).unbind()
    return settle_kv.record(ran, k, v, out, into, [(kc.fmt, vc.fmt)])


def codecs(layer: LayerLayout, native: torch.dtype) -> list[tuple[Codec, Codec]]:
    """Key and value codec of each tier, then those of the 16-bit pool (new tokens and sinks)."""
    q = layer.policy.quantizer

    def codec(bits: int, width: int, levels: str, along: Along, block: int | None) -> Codec:
        group = width if q.group is None or not CODEBOOKS[levels].numbers else q.group
        turned = q.rotate and block != 1
        fmt = Format(bits, group, levels, turned, along, block if turned else None)
        return Codec(None if bits == 16 else fmt, native)

    def pair(key_bits: int, value_bits: int) -> tuple[Codec, Codec]:
        keys = codec(key_bits, layer.key_dim, q.levels, q.along, None)
        levels = q.value_levels or q.levels
        return keys, codec(value_bits, layer.value_dim, levels, "channels", q.value_block)

    return [*(pair(t.key_bits, t.value_bits) for t in layer.policy.tiers), pair(16, 16)]


def as_held(x: Tensor | Packed) -> Held:
    """What an op takes and makes, as it is held."""
    if isinstance(x, Tensor):
        return (x,)
    return (x.codes, x.scales.flatten(-2)) if x.scales.shape[-1] else (x.codes,)


def straight(rounded: Tensor, x: Tensor) -> Tensor:
    """`rounded`, with the gradient of `x` (straight-through, arXiv:1308.3432).

    Rounding has no gradient of its own, and a cast to 16 bits would round the gradient as well,
    which loses those below 6e-8. Where no gradient is wanted, this is `rounded` itself.
    """
    return rounded.detach() + (x - x.detach()) if x.requires_grad else rounded
