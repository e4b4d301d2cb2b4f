"""What the probes share: a case, seeded data, and the way back to the CPU.

A probe is a module with `cases(device, dtype)`, small arguments that cover what an op
distinguishes, and `differs(got, *args, **kwargs)`, which returns None or why a result is wrong; it
is given everything on the CPU, where the references are tested. (On CUDA torch itself differs in
the last bit: it divides by a number by multiplying with its inverse.)
"""

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

Case: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


class Draw:
    """Seeded data on a device.

    Drawn on the CPU from a generator of its own: every machine probes the same numbers, and the
    caller's random state stays as it was.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int = 0) -> None:
        self.device, self.dtype = device, dtype
        self._source = torch.Generator("cpu").manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Gaussian numbers in `dtype`, or that of the case."""
        x = torch.randn(shape, generator=self._source, device="cpu", dtype=torch.float32)
        return x.to(self.device, dtype or self.dtype)

    def weights(self, n: int) -> Tensor:
        """Numbers in 0 to 1, `[n]` fp32."""
        x = torch.rand(n, generator=self._source, device="cpu", dtype=torch.float32)
        return x.to(self.device)

    def whole(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Whole numbers in `[low, high)`."""
        x = torch.randint(low, high, shape, generator=self._source, device="cpu")
        return x.to(self.device, dtype)


def moved(x: Any, device: torch.device) -> Any:
    """`x` with every tensor in it on `device`; looks into sequences, dicts and dataclasses."""
    if isinstance(x, Tensor):
        return x.to(device)
    if isinstance(x, dict):
        return {key: moved(value, device) for key, value in x.items()}
    if isinstance(x, Sequence) and not isinstance(x, str):
        return type(x)(moved(value, device) for value in x)  # type: ignore[call-arg]
    if is_dataclass(x) and not isinstance(x, type):
        made = {f.name: moved(getattr(x, f.name), device) for f in fields(x) if f.init}
        return replace(x, **made)
    return x


def on_cpu(x: Any) -> Any:
    """`x` with every tensor in it on the CPU."""
    return moved(x, torch.device("cpu"))
