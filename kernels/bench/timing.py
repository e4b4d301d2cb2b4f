"""The GPU, and times of calls on it; a CPU stands in for one where there is none."""

import importlib.metadata
import os
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from statistics import median
from typing import Any

import torch
from pool import emit, output

from kvsearch_kernels.ahead import ops

PACKAGES = ("torch", "triton", "transformers", "numba", "numpy", "flash-attn", "kvsearch")
CLOCKS = ("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw")


def stands_in() -> bool:
    """Whether a CPU and tiny shapes stand in for a GPU: nothing that is timed has a meaning."""
    return os.environ.get("KVSEARCH_STAND_IN") == "1"


def device() -> torch.device:
    """Where units run."""
    return torch.device("cpu") if stands_in() else torch.device("cuda", 0)


def wait() -> None:
    """Wait for the GPU."""
    if not stands_in():
        torch.cuda.synchronize()


def spent(call: Callable[[], Any]) -> tuple[float, float]:
    """Milliseconds of a call on the GPU, and until the host has launched it."""
    wait()
    if stands_in():
        start = time.perf_counter()
        call()
        ms = (time.perf_counter() - start) * 1e3
        return ms, ms
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    start = time.perf_counter()
    call()
    host = (time.perf_counter() - start) * 1e3
    end.record()
    end.synchronize()
    return begin.elapsed_time(end), host


def replay(runs: Sequence[Callable[[], Any]], seconds: float) -> list[float]:
    """Milliseconds a call, of CUDA graphs that are replayed in turn."""
    graphs: list[Callable[[], Any]] = []
    for run in runs:
        for _ in range(1 if stands_in() else 3):
            run()
        wait()
        if stands_in():
            graphs.append(run)
            continue
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        graphs.append(graph.replay)
    times: list[float] = []
    seconds, least = (0.0, 3) if stands_in() else (seconds, 20)
    end = time.monotonic() + seconds
    while len(times) < least or (time.monotonic() < end and len(times) < 400):
        times.append(spent(lambda: [graph() for graph in graphs])[0] / len(graphs))
    return times


def spread(times: Sequence[float]) -> list[float]:
    """The least, the median and the most, with four digits."""
    return [float(f"{x:.4g}") for x in (min(times), median(times), max(times))]


def clocks() -> dict[str, float]:
    """What `nvidia-smi` says of the GPU's clocks (MHz), temperature (C) and power (W) now."""
    found: dict[str, float] = {}
    if not stands_in():
        command = ["nvidia-smi", "-i", "0", f"--query-gpu={','.join(CLOCKS)}"]
        for name, word in zip(
            CLOCKS, output([*command, "--format=csv,noheader,nounits"]).split(","), strict=False
        ):
            with suppress(ValueError):
                found[name] = float(word)
    return found


def free() -> int:
    """Bytes of memory that are free; without limit on a CPU."""
    return 1 << 60 if stands_in() else torch.cuda.mem_get_info()[0]


def peak(reset: bool = False) -> int:
    """Most bytes allocated since the last `reset`; none are counted on a CPU."""
    if stands_in():
        return 0
    if reset:
        torch.cuda.reset_peak_memory_stats()
    return torch.cuda.max_memory_allocated()


def about() -> None:
    """The GPU and versions; raises in one sentence where nothing can run."""
    found: dict[str, Any] = {
        name: _version(name) for name in PACKAGES
    } | {"python": platform.python_version(), "cpus": os.cpu_count(), "ops": [*ops()]}  # fmt: skip
    if stands_in():
        emit(**found, gpu="no GPU: a CPU stands in", driver="", memory=0, capability="")
        return
    if not torch.cuda.is_available():
        raise RuntimeError("there is no GPU here; --stand-in tries the command on the CPU")
    torch.zeros(1, device="cuda")
    card = torch.cuda.get_device_properties(0)
    if (card.major, card.minor) < (8, 0):
        raise RuntimeError(
            f"{card.name} has compute capability {card.major}.{card.minor}, and kernels need 8.0"
        )
    driver = output(
        ["nvidia-smi", "-i", "0", "--query-gpu=driver_version", "--format=csv,noheader"]
    )
    emit(
        **found, gpu=card.name, driver=driver, memory=card.total_memory,
        capability=f"{card.major}.{card.minor}", cuda=torch.version.cuda,
    )  # fmt: skip


def _version(name: str) -> str | None:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return None
