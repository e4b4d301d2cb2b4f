"""One stage of the benchmark in a process of its own; `run.py` starts it, with a time limit.

    python worker.py gate '{"op": ..., "dtype": ...}'

Rows go to stdout, one JSON object a line, as soon as they are known, so those of a process that
hangs or dies later are kept.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

import steps  # noqa: E402
from cases import OPS, Case, Work, build, cases, tensors  # noqa: E402

from kvsearch_kernels.probing import on_cpu  # noqa: E402
from kvsearch_kernels.trust import prove  # noqa: E402

MARK = "row "
# Input sets in rotation: at most so many, and no more than it takes that caches of 60 MB do not
# hold what is read next.
SETS, ROTATED = 4, 512 << 20
CASE_SECONDS = 0.2  # of replays


def emit(**row: Any) -> None:
    """Hand a row to the parent."""
    print(MARK + json.dumps(row), flush=True)


def sentence(error: BaseException) -> str:
    """The first line of an error, with its type."""
    line = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {line}"


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
    args, kwargs = on_cpu(work.args), on_cpu(work.kwargs)
    if work.op.name == "quantize_kv":
        kwargs.setdefault("slots", None)
    reason: str | None = differs(got, *args, **kwargs)
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
    device, kind = torch.device("cuda", torch.cuda.current_device()), getattr(torch, dtype)
    with poisoned():
        reason = prove(OPS[op], "triton", device, kind)
    emit(reason=reason or examine(distinct(op)[0], "cuda", kind, "triton"))


def _examined(case: Case, dtype: str) -> str | None:
    try:
        return examine(case, "cuda", getattr(torch, dtype), "triton")
    except Exception as error:  # whatever a compiler or a launch may raise
        return sentence(error)


def check(op: str, dtype: str, workers: int) -> None:
    """Compile every kernel of an op, in parallel, and compare each with the reference."""
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        todo = {pool.submit(_examined, case, dtype): case for case in distinct(op)}
        for done in as_completed(todo):
            case = todo[done]
            emit(model=case.model.name, variant=case.variant, reason=done.result())


def replay(runs: Sequence[Callable[[], Any]], seconds: float) -> list[float]:
    """Milliseconds a call, of CUDA graphs that are replayed in turn."""
    graphs = []
    for run in runs:
        for _ in range(3):
            run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        graphs.append(graph)
    times: list[float] = []
    end = time.monotonic() + seconds
    while len(times) < 20 or (time.monotonic() < end and len(times) < 400):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for graph in graphs:
            graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / len(graphs))
    return times


def roof() -> None:
    """Bytes per second that a plain sum over 4 GiB reads."""
    x = torch.ones(1 << 30, device="cuda")
    emit(roof=x.nbytes / median(replay([lambda: x.sum()], 1.0)) * 1e3)


def clock(op: str, impls: list[str], dtype: str, kernels: list[list[str]], seconds: float) -> None:
    """Time the cases of an op whose model and variant are among `kernels`, until time is up."""
    end = time.monotonic() + seconds
    for i, impl in enumerate(impls):
        now = time.monotonic()
        _clock(op, impl, getattr(torch, dtype), kernels, now + (end - now) / (len(impls) - i))


def _clock(op: str, impl: str, dtype: torch.dtype, kernels: list[list[str]], end: float) -> None:
    wanted = {(model, variant) for model, variant in kernels}
    for case in cases():
        if case.op != op or (case.model.name, case.variant) not in wanted:
            continue
        row: dict[str, Any] = {
            "impl": impl, "model": case.model.name, "batch": case.batch, "context": case.context,
            "variant": case.variant,
        }  # fmt: skip
        if time.monotonic() + CASE_SECONDS > end:
            emit(**row, reason="there was no time left for this and what follows")
            return
        try:
            sets = [build(case, "cuda", 0, tiny=False, dtype=dtype)]
            if impl != "triton" and impl not in sets[0].baselines:
                continue
            more = min(SETS, -(-ROTATED // sets[0].nbytes)) - 1
            sets += [build(case, "cuda", 1 + i, tiny=False, dtype=dtype) for i in range(more)]
            times = replay([s.run(impl) for s in sets], CASE_SECONDS)
        except torch.OutOfMemoryError:
            sets = []
            torch.cuda.empty_cache()
            emit(**row, reason="it does not fit into the memory of the device")
            continue
        except Exception as error:
            emit(**row, reason=sentence(error))
            if isinstance(error, ImportError) or "CUDA error" in str(error):
                return  # the others cannot run either
            continue
        p20, _, _, p80 = quantiles(times, n=5)
        emit(**row, nbytes=sets[0].nbytes, ms=[p20, median(times), p80])


def results_are_finite(case: Case, device: str, dtype: torch.dtype) -> bool:
    """Whether the reference runs on a tiny case; for dry runs."""
    return all(
        x.isfinite().all()
        for peaked in (False, True)
        for x in tensors(
            build(case, device, 0, tiny=True, dtype=dtype, peaked=peaked).run("reference")()
        )
    )


STAGES: dict[str, Callable[..., None]] = {
    "gate": gate, "check": check, "roof": roof, "clock": clock,
}  # fmt: skip

if __name__ == "__main__":
    STAGES[sys.argv[1]](**json.loads(sys.argv[2]))
