"""The cases of an op's probe, run on the machine."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from itertools import islice

import torch

from kvsearch_kernels.op import Op
from kvsearch_kernels.probing import on_cpu
from machine.driver import LAUNCHES


@dataclass(frozen=True)
class Result:
    """Of one case: what is wrong, if anything, and the kernels that were launched."""

    case: int
    reason: str | None
    launches: tuple[str, ...]


def results(
    op: Op, dtype: torch.dtype, most: int | None = None, *, first: int = 0
) -> Iterator[Result]:
    """What a GPU would have to pass before `auto` trusts it, case by case; inside `machine`."""
    assert op.probe is not None
    probe = import_module(op.probe)
    for i, (args, kwargs) in enumerate(islice(probe.cases(torch.device("cpu"), dtype), most)):
        if i < first:
            continue
        LAUNCHES.clear()
        try:
            got = on_cpu(op.again("triton", *args, **kwargs))
            reason = probe.differs(got, *on_cpu(args), **on_cpu(kwargs))
        except Exception as error:  # whatever a compiler or the machine may raise
            reason = f"{type(error).__name__}: {error}"
        yield Result(i, reason, tuple(LAUNCHES))
