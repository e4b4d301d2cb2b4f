"""Which storage formats the pools of one layer use."""

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvsearch.policy import LayerLayout
from kvsearch_kernels.codebooks import CODEBOOKS
from kvsearch_kernels.quantize_kv import (
    Format,
    Packed,
    dequantize_kv,
    fake_quantize,
    quantize_kv,
)

Held = tuple[Tensor, ...]
Along = Literal["channels", "tokens"]
Ran = MutableMapping[str, str]  # op -> the implementation of it that ran

SMALL = 1 << 17  # numbers that a loop of one thread rounds before torch does, on a CPU


@dataclass(frozen=True)
class Codec:
    """Stores vectors `[..., D]` in one format; `fmt` None keeps the 16-bit type `native`."""

    fmt: Format | None
    native: torch.dtype

    def read_back(self, x: Tensor, ran: Ran) -> Tensor:
        """The values that come back after storing `x` `[B, H, N, D]`, in the type of `x`."""
        if self.fmt is None:
            return x.to(self.native).to(x.dtype)
        few = x.numel() <= SMALL and quantize_kv.pick(x, self.fmt) == "numba"  # the same to the bit
        if not few and (x.device.type == "cpu" or self.along_tokens):
            return fake_quantize(x, self.fmt).to(x.dtype)
        return self.decode(self.encode(x, ran), x.dtype, ran)  # a kernel or loop each

    def encode(self, x: Tensor, ran: Ran) -> Held:
        """The tensors that are really held of `x` `[B, H, N, D]`."""
        if self.fmt is None:
            return (x.to(self.native),)
        return as_held(quantize_kv.record(ran, x, self.fmt))

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


def entering(layer: LayerLayout, before: int, after: int, in_tier: int) -> tuple[int, int]:
    """Tokens of the one tier that a compaction leaves there, and tokens that it moves there.

    Eviction is by age: what is dropped was in the tier.

    Args:
        layer: integers of the layer.
        before, after: slots held before and after the compaction.
        in_tier: slots in the tier before.
    """
    left = max(0, in_tier - (before - after))
    return left, layer.tier_counts(after)[0] - left
