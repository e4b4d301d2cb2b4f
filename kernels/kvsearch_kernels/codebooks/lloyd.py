"""Lloyd-Max levels of a unit Gaussian times one scale."""

from typing import TYPE_CHECKING

from kvsearch_kernels.codebooks.base import Codebook
from kvsearch_kernels.codebooks.gaussian import lloyd_levels_on

if TYPE_CHECKING:
    from torch import Tensor


class Lloyd(Codebook):
    """One scale a group and no zero; made for rotated vectors, which are nearly Gaussian."""

    numbers = 1
    words = "Lloyd-Max"

    def encode(self, groups: "Tensor", bits: int) -> tuple["Tensor", "Tensor"]:
        """The scale is the one that fits the chosen codes best, in least squares."""
        import torch

        g, levels = groups, lloyd_levels_on(bits, groups.device)
        scale = g.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-8)
        codes = _nearest(g / scale, bits)
        fitted = levels.index_select(0, codes.view(-1)).view(g.shape)
        scale = (g * fitted).sum(-1, keepdim=True) / fitted.square().sum(-1, keepdim=True)
        return codes, scale.to(torch.float16)

    def decode(self, codes: "Tensor", scales: "Tensor", bits: int) -> "Tensor":
        """`level * scale`."""
        return lloyd_levels_on(bits, codes.device)[codes.long()] * scales.float()


def _nearest(z: "Tensor", bits: int) -> "Tensor":
    """Codes of the levels nearest to `z`."""
    import torch

    if z.device.type == "cpu" and z.dtype is torch.float32:
        from kvsearch_kernels.codebooks.nearest import nearest_codes

        return nearest_codes(z, bits)
    levels = lloyd_levels_on(bits, z.device)
    return torch.bucketize(z.contiguous(), (levels[1:] + levels[:-1]) / 2)
