"""Products of many tokens with a model's weights, in fp32 on a CPU that MKL serves badly.

torch gives them to MKL, which takes slow code on processors that are not Intel's; oneDNN, which
torch brings along as well, is faster there (`studies/2026-11-evaluation-cost`). Both are fp32; sums
are rounded in another order.
"""

import platform

import torch
from torch import Tensor, nn

ROWS, SIZE = 32, 1 << 16  # tokens, and elements of the weights, from which oneDNN is faster


class OneDnnLinear(nn.Linear):
    """`nn.Linear` by oneDNN where no gradient is asked for and there are `ROWS` tokens or more."""

    def forward(self, input: Tensor) -> Tensor:
        """Output `[..., out]` of `input` `[..., in]`."""
        few = input.numel() < ROWS * self.in_features
        plain = input.device.type == "cpu" and input.dtype == self.weight.dtype == torch.float32
        if few or not plain or torch.is_grad_enabled():
            return super().forward(input)
        found: Tensor = torch.ops.mkldnn._linear_pointwise(
            input, self.weight, self.bias, "none", [], ""
        )
        return found


def suits(processor: str | None = None) -> bool:
    """Whether oneDNN is there, and faster than MKL on this processor, or on the one named."""
    if processor is None:
        known = getattr(torch.cpu, "get_capabilities", dict[str, object])()
        processor = str(known.get("cpu_name", ""))
    there = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return there and x86 and torch.backends.mkl.is_available() and "AMD" in processor


def by_onednn(model: nn.Module) -> None:
    """Let the model's large linear layers use oneDNN; weights and their names stay as they are."""
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.numel() >= SIZE:
            module.__class__ = OneDnnLinear
