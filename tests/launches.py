"""What an op would launch on a GPU: its Triton kernels are counted, its reference gives the result.

Where Triton takes the arguments, its implementation runs with kernels that only count. What is
around them (copies, rotations) counts as what it is. Results come from the reference, uncounted.
"""

import importlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from kvsearch_kernels.op import Op
from tests.tagged import Device

KERNELS = {  # Triton kernel -> folder of its op
    "attend": "lifetime_attention",
    "score": "scored_attention",
    "quantize": "quantize_kv",
    "dequantize": "quantize_kv",
    "enter": "decode_step",
    "turn_heads": "decode_step",
    "attend_heads": "decode_step",
    "combine_heads": "decode_step",
    "count": "decode_step",
    "repack": "repack_kv",
    "choose": "choose_slots",
    "evict": "evict_in_place",
}


class Kernel:
    """Stands for a Triton kernel: notes its launches and how often it would be compiled.

    Attributes:
        name: of the kernel.
        device: where launches are counted.
        variants: what Triton compiles anew for: types, constants, and whether integers are 1 or
            multiples of 16, unless they are declared not to matter.
    """

    def __init__(self, name: str, real: Any, device: Device) -> None:
        self.name, self.device = name, device
        self.variants: set[Any] = set()
        self._names = list(real.arg_names)
        self._plain = {p.name for p in real.params if p.do_not_specialize}

    def __getitem__(self, grid: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> None:
            self.device.launches[f"triton::{self.name}"] += 1
            given = {**dict(zip(self._names, args, strict=False)), **kwargs}
            self.variants.add(tuple((k, self._kind(k, v)) for k, v in sorted(given.items())))

        return run

    def _kind(self, name: str, x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return x.dtype, x.data_ptr() % 16 == 0
        if isinstance(x, bool | float) or name.isupper():
            return type(x) if isinstance(x, float) else x
        if name in self._plain:
            return int
        return x == 1, x % 16 == 0


@contextmanager
def kernels(device: Device) -> Iterator[dict[str, Kernel]]:
    """Ops on tagged tensors count as their Triton kernels; gives these kernels."""
    with pytest.MonkeyPatch.context() as patch:
        found = {}
        for name, home in KERNELS.items():
            module = importlib.import_module(f"kvsearch_kernels.{home}.triton_kernels")
            found[name] = Kernel(name, getattr(module, name), device)
            patch.setattr(module, name, found[name])
        plain, choose = Op._forward, Op.pick

        def pick(op: Any, *args: Any, **kwargs: Any) -> str:
            takes = device.counting and "triton" in op.impls
            if takes and op._why_not("triton", *args, **kwargs) is None:
                return "triton"
            return choose(op, *args, **kwargs)

        def forward(op: Any, impl: str, *args: Any, **kwargs: Any) -> Any:
            if impl != "triton":
                return plain(op, impl, *args, **kwargs)
            op._module("triton").forward(*args, **kwargs)
            device.counting = False
            try:
                return plain(op, "reference", *args, **kwargs)
            finally:
                device.counting = True

        patch.setattr(Op, "pick", pick)
        patch.setattr(Op, "_forward", forward)
        yield found


def since(before: Counter[str], now: Counter[str]) -> Counter[str]:
    """What was launched in between."""
    return now - before
