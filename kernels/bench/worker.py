"""What a quarter of an hour asks of the kernels: are they right, and how long do they take?

Each function is a unit of `quarter.py`, in a process of its own.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from statistics import median
from typing import Any

import steps
import torch
from cases import OPS, Case, Work, build, cases
from pool import emit, sentence
from timing import device, replay, spread, stands_in
from torch import Tensor

from kvsearch_kernels.ahead import ops
from kvsearch_kernels.probing import on_cpu
from kvsearch_kernels.trust import prove

# Input sets in rotation: at most so many, and no more than it takes that caches of 60 MB do not
# hold what is read next.
SETS, ROTATED = 4, 512 << 20
CASE_SECONDS = 0.2  # of replays


@contextmanager
def poisoned() -> Iterator[None]:
    """Let `torch.empty` return NaN (integers: 0x7F), so that what is never written shows."""
    real = torch.empty

    def empty(*size: Any, **options: Any) -> Tensor:
        made: Tensor = real(*size, **options)
        return made.fill_(float("nan") if made.is_floating_point() else 0x7F)

    torch.empty = empty  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.empty = real


def wrong(work: Work, impl: str) -> str | None:
    """Why a result is outside the error budget of the op's probe, or None."""
    if work.op.name == "decode_step":  # what it writes to is compared too
        with poisoned():
            return steps.differs(work.run(impl), on_cpu, work.args, **work.kwargs)
    with poisoned():
        got = on_cpu(work.run(impl)())
    differs = import_module(str(work.op.probe)).differs
    reason: str | None = differs(got, *on_cpu(work.args), **on_cpu(work.kwargs))
    return reason


def examine(case: Case, device: str, dtype: torch.dtype, impl: str) -> str | None:
    """Compare `impl` on a short context with the reference, in flat and in peaked attention."""
    for peaked in (False, True):
        work = build(case, device, 1234, tiny=True, dtype=dtype, peaked=peaked)
        if reason := wrong(work, impl):
            return f"{'peaked' if peaked else 'flat'} attention: {reason}"
    return None


def distinct(op: str) -> list[Case]:
    """One case of each kernel of an op: kernels depend on neither batch nor context."""
    first: dict[tuple[str, str], Case] = {}
    for case in cases():
        if case.op == op:
            first.setdefault((case.model.name, case.variant), case)
    return list(first.values())


def gate(op: str, dtype: str) -> None:
    """The op's probe, with outputs and scratch set to NaN, and its first case."""
    kind, impl = getattr(torch, dtype), "reference" if stands_in() else "triton"
    start, reason = time.monotonic(), None
    try:
        with poisoned():
            reason = prove(ops()[op], impl, device(), kind)
        if reason is None and op in OPS:
            reason = examine(distinct(op)[0], str(device()), kind, impl)
    finally:
        emit(
            op=op, dtype=dtype, impl=impl, reason=reason, seconds=round(time.monotonic() - start, 2)
        )
    if reason is not None:
        raise AssertionError(reason)


def loops() -> None:
    """Compile the loops of the CPU, which tests compare kernels with; numba keeps them."""
    for name, op in ops().items():
        if "numba" in op.impls and not stands_in():
            with suppress(Exception):  # shows where they are used
                prove(op, "numba", torch.device("cpu"), torch.float32)
                emit(op=name, impl="numba")


def compare(op: str, model: str, variant: str, dtype: str) -> None:
    """Compile one kernel of an op, and compare it with the reference; raises if it is wrong."""
    (case,) = (c for c in distinct(op) if (c.model.name, c.variant) == (model, variant))
    impl = "reference" if stands_in() else "triton"
    if reason := examine(case, str(device()), getattr(torch, dtype), impl):
        raise AssertionError(reason)


def roof() -> None:
    """Bytes per second that a plain sum over 4 GiB reads."""
    x = torch.ones(1 << (10 if stands_in() else 30), device=device())
    emit(roof=x.nbytes / median(replay([lambda: x.sum()], 1.0)) * 1e3)


def clock(
    op: str, impls: list[str], dtype: str, models: list[str], contexts: list[int] | None = None,
    variants: Sequence[str] | None = None,
) -> None:  # fmt: skip
    """Time cases of an op; kernels are compared with the reference before."""
    kind, verdicts, over = getattr(torch, dtype), dict[tuple[str, str], str | None](), set[str]()
    for case in cases():
        if case.op != op or case.model.name not in models:
            continue
        if contexts is not None and (case.context not in contexts or case.batch != 8):
            continue
        if variants is not None and case.variant not in variants:
            continue
        for impl in impls:
            row = {"op": op, "impl": impl, "dtype": dtype, "model": case.model.name}
            row |= {"batch": case.batch, "context": case.context, "variant": case.variant}
            key = case.model.name, case.variant
            if impl == "triton" and key not in verdicts:
                verdicts[key] = _verdict(case, kind)
            if impl in over:
                continue
            found: dict[str, Any] = {"reason": verdicts.get(key) if impl == "triton" else None}
            try:
                if found["reason"] is None:
                    found = _timed(case, impl, kind)
            except torch.OutOfMemoryError:
                found = {"reason": "it does not fit into the memory of the device"}
            except Exception as error:  # whatever a compiler or a launch may raise
                found = {"reason": sentence(error)}
                if isinstance(error, ImportError):
                    over.add(impl)
                if "CUDA error" in found["reason"]:
                    raise  # nothing more runs in this process
            if found:
                emit(**row, **found)
            if not stands_in():
                torch.cuda.empty_cache()


def _verdict(case: Case, dtype: torch.dtype) -> str | None:
    try:
        impl = "reference" if stands_in() else "triton"
        return examine(case, str(device()), dtype, impl)
    except Exception as error:  # whatever a compiler or a launch may raise
        return sentence(error)


def _timed(case: Case, impl: str, dtype: torch.dtype) -> dict[str, Any]:
    """Times and bytes of a case, or nothing if it has no such baseline."""
    small = stands_in()

    def made(seed: int) -> Work:
        return build(case, str(device()), seed, tiny=small, dtype=dtype)

    sets = [made(0)]
    if impl != "triton" and impl not in sets[0].baselines:
        return {}
    sets += [made(i) for i in range(1, 1 if small else min(SETS, -(-ROTATED // sets[0].nbytes)))]
    runs = [x.run("reference" if small and impl == "triton" else impl) for x in sets]
    return {"nbytes": sets[0].nbytes, "ms": spread(replay(runs, CASE_SECONDS))}
