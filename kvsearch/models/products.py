"""Products of many tokens with a model's weights, in fp32 on a CPU that MKL serves badly.

torch gives them to MKL, which uses no AVX-512 on processors that are not Intel's, and which is slow
there with output layers, whose weights are many times as long as wide. oneDNN, which torch brings
along as well, is faster with those (`studies/2026-11-evaluation-cost`). Both are fp32; sums are
rounded in another order.
"""

import platform

import torch
from torch import Tensor, nn

ROWS, SIZE = 32, 1 << 16  # tokens, and elements of the weights, from which oneDNN is faster
LONG = 16  # outputs per input of an output layer, at least


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


def suits(processor: str | None = None, avx512: bool | None = None) -> int | None:
    """Outputs per input from which oneDNN is faster than MKL here; None if it never is.

    Args:
        processor: its name; None asks torch.
        avx512: whether it has those instructions; None asks torch.
    """
    known = getattr(torch.cpu, "get_capabilities", dict[str, object])()
    if processor is None:
        processor = str(known.get("cpu_name", ""))
    if avx512 is None:
        avx512 = bool(known.get("avx512_f", False))
    there = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    if not (there and x86 and torch.backends.mkl.is_available() and "AMD" in processor):
        return None
    return 0 if avx512 else LONG


def by_onednn(model: nn.Module, least: int = 0) -> None:
    """Let the model's large linear layers use oneDNN; weights and their names stay as they are.

    Args:
        model: whatever has linear layers.
        least: outputs per input that a layer must have, see `suits`.
    """
    for module in model.modules():
        if type(module) is not nn.Linear or module.weight.numel() < SIZE:
            continue
        if module.out_features >= least * module.in_features:
            module.__class__ = OneDnnLinear
