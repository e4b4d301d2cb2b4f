"""What `auto` takes of every op on a device, and whether it computes there what it should."""

import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kvsearch_kernels.ahead import ops
from kvsearch_kernels.op import Op
from kvsearch_kernels.trust import holds


@dataclass(frozen=True)
class Proof:
    """The probe of one op.

    Attributes:
        op: its name.
        took: how many of the cases each implementation ran.
        faults: what was wrong, in sentences: with an implementation that `auto` passes over
            therefore, or with what it took.
        seconds: compilation included.
    """

    op: str
    took: dict[str, int]
    faults: tuple[str, ...]
    seconds: float


def proofs(device: torch.device, dtype: torch.dtype) -> Iterator[Proof]:
    """Run the probe of every op that has one, with what `auto` takes there."""
    for name, op in ops().items():
        start = time.perf_counter()
        took, faults = _probed(op, device, dtype)
        yield Proof(name, took, faults, time.perf_counter() - start)


def _probed(
    op: Op[Any, Any], device: torch.device, dtype: torch.dtype
) -> tuple[dict[str, int], tuple[str, ...]]:
    took = Counter[str]()

    def call(*args: Any, **kwargs: Any) -> Any:
        ran: dict[str, str] = {}
        out = op.record(ran, *args, **kwargs)
        took.update(ran.values())
        return out

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            reason = holds(op, call, device, dtype)
        except Exception as error:  # whatever a compiler or a launch may raise
            line = (str(error).strip() or "no message").splitlines()[0]
            reason = f"{type(error).__name__}: {line}"
    faults = [str(w.message) for w in said if "auto passes over" in str(w.message)]
    return dict(took), (*faults, *([reason] if reason else []))
