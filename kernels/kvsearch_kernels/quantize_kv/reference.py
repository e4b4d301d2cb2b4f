"""What every storage format means: `[..., D]` vectors to packed codes and scales, and back.

One vector is one token's key or value in one head. Groups lie inside the vector, so a token can
change its precision alone. `fake_quantize(x) == dequantize(quantize(x))` bit for bit.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from kvsearch_kernels.butterflies import butterflies
from kvsearch_kernels.codebooks import CODEBOOKS


@dataclass(frozen=True)
class Format:
    """A storage format below 16 bits.

    Attributes:
        bits: 8, 5, 4, 3, 2 or 1 per channel, see `Codebook.bits`.
        group: channels per scale; divides `D`.
        levels: a key of `kvsearch_kernels.codebooks.CODEBOOKS`.
        rotate: Hadamard rotation of the vector before quantising.
        along: `channels` groups channels of one vector; `tokens` groups one channel of `group`
            neighbouring tokens, the second axis from the right.
        block: most channels that one rotation mixes, a power of two; None is as many as it can.
    """

    bits: int
    group: int
    levels: str = "uniform"
    rotate: bool = False
    along: Literal["channels", "tokens"] = "channels"
    block: int | None = None

    @property
    def numbers(self) -> int:
        """16-bit words per group."""
        return CODEBOOKS[self.levels].numbers


@dataclass(frozen=True)
class Packed:
    """Codes `[..., N, D * bits / 8]` uint8 and scales `[..., N, D / group, numbers]` fp16.

    Groups along tokens have scales `[..., groups, D, numbers]`, and the first group may have lost
    its first `lead` tokens.
    """

    codes: Tensor
    scales: Tensor
    lead: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors."""
        return self.codes.nbytes + self.scales.nbytes


def rotation_block(D: int, most: int | None = None) -> int:
    """Channels that one rotation mixes: the largest power of two that divides `D`, up to `most`."""
    return min(D & -D, most or D)


def hadamard(x: Tensor, most: int | None = None) -> Tensor:
    """Orthonormal Hadamard transform of the last axis, see `rotation_block`; its own inverse.

    Written as sums and differences, so that the result does not depend on how many vectors are
    transformed at once.
    """
    D = x.shape[-1]
    block = rotation_block(D, most)
    return butterflies(x.unflatten(-1, (D // block, block))).flatten(-2) * block**-0.5


def _encode(x: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    """Codes `[..., D]` (whole numbers) and scales `[..., D / group, numbers]` of fp32 `x`."""
    if fmt.rotate:
        x = hadamard(x, fmt.block)
    g = x.unflatten(-1, (x.shape[-1] // fmt.group, fmt.group))
    codes, scales = CODEBOOKS[fmt.levels].encode(g, fmt.bits)
    return codes.flatten(-2), scales


def _decode(codes: Tensor, scales: Tensor, fmt: Format) -> Tensor:
    """Values `[..., D]` fp32 of codes and scales."""
    c = codes.unflatten(-1, (codes.shape[-1] // fmt.group, fmt.group))
    x = CODEBOOKS[fmt.levels].decode(c, scales, fmt.bits).flatten(-2)
    return hadamard(x, fmt.block) if fmt.rotate else x


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Pack `[..., D]` codes into `[..., D * bits / 8]` bytes, channel-planar.

    Byte i of a plane holds channels i, i + D/n, i + 2D/n, ... (n = 8 / bits codes a byte), so that
    unpacking needs no shuffle. Three and five bits are a plane of the lower ones followed by a
    1-bit plane.
    """
    if bits == 8:
        return codes.to(torch.uint8)
    if bits in (3, 5):
        low = bits - 1
        return torch.cat([_pack(codes & (2**low - 1), low), _pack(codes >> low, 1)], -1)
    n = 8 // bits
    parts = codes.unflatten(-1, (n, codes.shape[-1] // n))
    shifts = torch.arange(n, device=codes.device).mul(bits).unsqueeze(-1)
    return (parts << shifts).sum(-2).to(torch.uint8)


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """Inverse of `_pack`; codes as uint8."""
    if bits == 8:
        return packed
    if bits in (3, 5):
        low, share = bits - 1, packed.shape[-1] // bits
        lower, top = packed.split([share * low, share], -1)
        return _unpack(lower, low) | (_unpack(top, 1) << low)
    mask = 2**bits - 1
    return torch.cat([(packed >> (bits * i)) & mask for i in range(8 // bits)], -1)


def quantize(x: Tensor, fmt: Format) -> Packed:
    """Quantise and pack `x` `[..., D]`; along tokens, the first group may be short.

    Returns:
        Codes `[..., D * bits / 8]` and scales `[..., D / group, numbers]`, see `Packed`.
    """
    if fmt.along == "tokens":
        codes, scales, lead = _encode_tokens(x.float(), fmt)
        return Packed(_pack(codes.long(), fmt.bits), scales, lead)
    codes, scales = _encode(x.float(), fmt)
    return Packed(_pack(codes.long(), fmt.bits), scales)


def dequantize(packed: Packed, fmt: Format) -> Tensor:
    """Values `[..., D]` in fp32."""
    if fmt.along == "tokens":
        return _decode_tokens(_unpack(packed.codes, fmt.bits), packed.scales, packed.lead, fmt)
    return _decode(_unpack(packed.codes, fmt.bits), packed.scales, fmt)


def fake_quantize(x: Tensor, fmt: Format) -> Tensor:
    """`dequantize(quantize(x, fmt), fmt)` in fp32, without packing."""
    if fmt.along == "tokens":
        return _decode_tokens(*_encode_tokens(x.float(), fmt), fmt)
    codes, scales = _encode(x.float(), fmt)
    return _decode(codes, scales, fmt)


def _encode_tokens(x: Tensor, fmt: Format) -> tuple[Tensor, Tensor, int]:
    """Codes `[..., N, D]`, scales `[..., groups, D, numbers]`, and tokens that the first lacks."""
    n, lead = x.shape[-2], -x.shape[-2] % fmt.group
    if fmt.rotate:
        x = hadamard(x, fmt.block)
    # what is missing repeats the first token, which changes no smallest and no largest value
    whole = torch.cat([x[..., :1, :].expand(*x.shape[:-2], lead, -1), x], -2) if lead else x
    columns = whole.unflatten(-2, (-1, fmt.group)).transpose(-1, -2)  # [..., groups, D, group]
    codes, scales = _encode(columns, replace(fmt, rotate=False, along="channels"))
    codes = codes.transpose(-1, -2).flatten(-3, -2)
    return codes[..., codes.shape[-2] - n :, :], scales.squeeze(-2), lead


def _decode_tokens(codes: Tensor, scales: Tensor, lead: int, fmt: Format) -> Tensor:
    """Values `[..., N, D]` fp32 of `_encode_tokens`'s results."""
    n, groups = codes.shape[-2], scales.shape[-3]
    c = torch.nn.functional.pad(codes, (0, 0, lead, groups * fmt.group - lead - n))
    columns = c.unflatten(-2, (groups, fmt.group)).transpose(-1, -2)
    x = _decode(columns, scales.unsqueeze(-2), replace(fmt, rotate=False, along="channels"))
    x = x.transpose(-1, -2).flatten(-3, -2)[..., lead : lead + n, :]
    return hadamard(x, fmt.block) if fmt.rotate else x


def dequantize_slots(packed: Packed, fmt: Format, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values `[..., D]` of packed tokens, computed in fp32 and rounded to `dtype`."""
    return dequantize(packed, fmt).to(dtype)
