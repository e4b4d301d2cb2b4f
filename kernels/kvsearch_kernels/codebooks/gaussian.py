"""Lloyd-Max levels of a unit Gaussian (Max 1960)."""

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Positive halves of the levels, by number of bits.
_HALVES = {
    1: (0.7979,),
    2: (0.4528, 1.5104),
    3: (0.2451, 0.7560, 1.3439, 2.1520),
    4: (0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326),
    5: (
        *(0.0659, 0.1981, 0.3314, 0.4667, 0.6049, 0.7471, 0.8946, 1.0488),
        *(1.2118, 1.3863, 1.5762, 1.7872, 2.0287, 2.3177, 2.6911, 3.2607),
    ),
}


@cache
def lloyd_levels(bits: int) -> "Tensor":
    """Levels of a unit Gaussian in rising order, `[2**bits]` fp32; 8 bits are Gaussian-uniform."""
    import torch

    with torch.inference_mode(False):  # where they are first asked for says nothing of later
        if bits == 8:  # at 8 bits an optimal codebook gains nothing over even steps to 4.2 sigma
            return torch.linspace(-4.2, 4.2, 256, dtype=torch.float32, device="cpu")
        half = torch.tensor(_HALVES[bits], dtype=torch.float32, device="cpu")
        return torch.cat([-half.flip(0), half])


def lloyd_levels_on(bits: int, device: "torch.device") -> "Tensor":
    """`lloyd_levels`, kept on a device."""
    import torch

    return _kept(bits, device, torch.is_inference_mode_enabled())


@cache
def _kept(bits: int, device: "torch.device", inference: bool) -> "Tensor":
    """Apart for what is made in inference mode, through which no gradient may pass."""
    from kvsearch_kernels.host_to_device import sent

    return sent(lloyd_levels(bits).numpy(), device)
