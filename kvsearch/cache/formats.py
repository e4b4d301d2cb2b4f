"""Which storage formats the pools of one layer use."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvsearch.policy import LayerLayout, Policy
from kvsearch_kernels.quantize_kv import Format, Packed, dequantize, fake_quantize, quantize


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

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """The tensors that are really held."""
        if self.fmt is None:
            return (x.to(self.native),)
        packed = quantize(x, self.fmt)
        return (packed.codes, packed.scales.flatten(-2))

    def decode(self, held: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """Values of held tensors."""
        if self.fmt is None:
            return held[0].to(dtype)
        numbers = 1 if self.fmt.levels == "lloyd" else 2  # per group: scale, or scale and zero
        scales = held[1].unflatten(-1, (held[1].shape[-1] // numbers, numbers))
        return dequantize(Packed(held[0], scales), self.fmt).to(dtype)


def codecs(layer: LayerLayout, native: torch.dtype) -> list[tuple[Codec, Codec]]:
    """Key and value codec of each tier, then those of the 16-bit pool (raw tokens and sinks)."""
    p = layer.policy

    def codec(bits: int) -> Codec:
        return Codec(None if bits == 16 else _format(p, bits, layer.shape.head_dim), native)

    tiers = [(codec(t.key_bits), codec(t.value_bits)) for t in p.tiers]
    return [*tiers, (codec(16), codec(16))]


def _format(policy: Policy, bits: int, head_dim: int) -> Format:
    q = policy.quantizer
    return Format(bits=bits, group=q.group or head_dim, levels=q.levels, rotate=q.rotate)
