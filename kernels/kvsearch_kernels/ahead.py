"""Compile the kernels that probes launch, in several processes, before a command needs them.

    python -m kvsearch_kernels.ahead --device cuda:0 --dtype bfloat16

The first use of an op on a GPU runs its probe (`trust`), for which Triton compiles kernel after
kernel: some 150 s of one core for all ops. What these processes compile lies in Triton's cache on
disk, where the command's process finds it. These processes prove nothing; if one fails, the first
use of the op compiles, proves and warns as it would without them.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO, Any

import torch

import kvsearch_kernels
from kvsearch_kernels.launch import DTYPES, emulated, lacks_memory, on, why_not_gpu
from kvsearch_kernels.op import Op

CASES, PARTS = 3, 8  # neighbouring cases that are compiled together; the last part has all others
LONG = ("decode_step", "repack_kv")  # these first
MEMORY = 1 << 30  # bytes on the GPU for each process: CUDA's own, and a probe's tensors
MOST, LIMIT = 16, 600.0  # processes, and seconds after which they are stopped
# Exit statuses: a kernel failed, as it would again; memory was short; the GPU refused all work.
FAILED, SHORT, REFUSED = 3, 4, 5
MODULE = "kvsearch_kernels.ahead"  # not `__name__`, which may be `__main__`


def ops() -> dict[str, Op[Any, Any]]:
    """All ops that Triton has to prove, those that take long to compile first."""
    found: dict[str, Op[Any, Any]] = {}
    for module in iter_modules(kvsearch_kernels.__path__):
        if module.ispkg:
            every = vars(import_module(f"{kvsearch_kernels.__name__}.{module.name}")).values()
            found |= {x.name: x for x in every if isinstance(x, Op) and "triton" in x.impls}
    return {name: found[name] for name in (*LONG, *(n for n in found if n not in LONG))}


def compile_ahead(
    device: torch.device, dtype: torch.dtype, say: Callable[[str], None] = print
) -> None:
    """Compile the kernels of all probes, if this machine's cache does not have them.

    Args:
        device: a GPU; on anything else nothing happens.
        dtype: of the model.
        say: told before and after, in one sentence each.
    """
    mark = _mark(device, dtype)
    count = 0 if mark is None or mark.exists() else _processes(device)
    if mark is None or count < 2:
        return
    name = torch.cuda.get_device_name(device)
    say(f"compiling kernels for {name}, which is needed once, in {count} processes")
    start = time.monotonic()
    command = [sys.executable, "-m", MODULE, "--device", str(device)]
    command += ["--dtype", str(dtype).removeprefix("torch.")]
    complete, fault = side_by_side(command, count, LIMIT)
    if complete:
        with suppress(OSError):  # nowhere to write to: the next run asks again
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()
    if fault is None:
        say(f"kernels are compiled: {time.monotonic() - start:.0f} s")
    else:
        say(f"not all kernels could be compiled ahead ({fault}); they are when they are needed")


def side_by_side(command: Sequence[str], count: int, limit: float) -> tuple[bool, str | None]:
    """Run `command` in `count` processes that share its work.

    Returns:
        Whether nothing would be gained by running it again: everything was tried, and what failed
        is neither for lack of memory nor of a GPU. And the last line of a process that failed, if
        one did.
    """
    home = str(Path(kvsearch_kernels.__path__[0]).parent)
    path = os.pathsep.join(filter(None, (home, os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    end = time.monotonic() + limit
    with TemporaryDirectory() as folder, ExitStack() as stack:
        shared = [*command, "--shared", folder]
        said = [stack.enter_context(TemporaryFile("w+")) for _ in range(count)]
        running = [
            subprocess.Popen(shared, stdout=subprocess.DEVNULL, stderr=file, env=env)
            for file in said
        ]
        try:
            ends = [p.wait(max(0.0, end - time.monotonic())) for p in running]
        except subprocess.TimeoutExpired:
            return False, f"stopped after {limit:.0f} s"
        finally:
            for process in running:
                process.kill()
                process.wait()
        failed = [_last(file) for file, status in zip(said, ends, strict=True) if status]
    return set(ends) <= {0, FAILED}, failed[0] if failed else None


def _last(file: IO[str]) -> str:
    """The last line of a file, or that there is none."""
    file.seek(0)
    return ([x.strip() for x in file if x.strip()] or ["no reason given"])[-1]


def _processes(device: torch.device) -> int:
    """How many the CPUs and the GPU's free memory allow."""
    free = torch.cuda.mem_get_info(device)[0]
    mine = getattr(os, "sched_getaffinity", None)  # not on every system
    cpus = os.cpu_count() or 1 if mine is None else len(mine(0))
    return min(MOST, cpus, int(free) // MEMORY)


def _mark(device: torch.device, dtype: torch.dtype) -> Path | None:
    """A file beside Triton's cache that is there once all is compiled; None if nothing is to be."""
    never = emulated() or os.environ.get("KVSEARCH_TRITON") == "0" or dtype not in DTYPES
    if device.type != "cuda" or never or find_spec("triton") is None or why_not_gpu(device):
        return None
    triton: Any = import_module("triton")
    made = hashlib.sha256()
    for file in sorted(Path(kvsearch_kernels.__path__[0]).rglob("*.py")):
        made.update(file.read_bytes())
    major, minor = torch.cuda.get_device_capability(device)
    made.update(f"{triton.__version__} {torch.__version__} {major}.{minor} {dtype}".encode())
    return Path(triton.knobs.cache.dir) / f"kvsearch-{made.hexdigest()[:16]}"


def _work(folder: Path | None, names: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Parts of the ops that no other process has taken, by making a file in `folder`."""
    for name in names:
        for part in range(PARTS):
            if folder is not None:
                try:
                    (folder / f"{name}.{part}").touch(exist_ok=False)
                except FileExistsError:
                    continue
            yield name, part


def _compile(op: Op[Any, Any], part: int, device: torch.device, dtype: torch.dtype) -> None:
    """Launch the kernels of some cases of a probe."""
    assert op.probe is not None
    with torch.no_grad(), on(device):
        for i, (args, kwargs) in enumerate(import_module(op.probe).cases(device, dtype)):
            if min(i // CASES, PARTS - 1) == part:
                op.run("triton", *args, **kwargs)


def main() -> int:
    """Compile what no other process that shares the work does.

    Returns:
        0; `FAILED` if a kernel failed; `SHORT` if one did for lack of memory; `REFUSED` at once
        if the GPU is not to be had, or CUDA refuses whatever follows an error.
    """
    parser = argparse.ArgumentParser(description="Compile the kernels that probes launch.")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--dtype", default="bfloat16", help="of the model")
    parser.add_argument("--only", default="", help="names of ops, with commas between them")
    parser.add_argument("--shared", type=Path, help="folder in which processes divide the work")
    asked, every, failed = parser.parse_args(), ops(), 0
    if asked.shared is None and not asked.only:
        compile_ahead(torch.device(asked.device), getattr(torch, asked.dtype))
        return 0
    names = asked.only.split(",") if asked.only else list(every)
    for name, part in _work(asked.shared, names):
        try:
            _compile(every[name], part, torch.device(asked.device), getattr(torch, asked.dtype))
        except Exception as error:  # whatever a compiler or a launch may raise
            line = (str(error).strip() or type(error).__name__).splitlines()[0]
            print(f"{name}: {line}", file=sys.stderr)
            short = lacks_memory(error)
            if not short and _refused(error):
                return REFUSED
            failed = SHORT if short or failed == SHORT else FAILED
    return failed


def _refused(error: Exception) -> bool:
    """Whether an error is of the device and not of a kernel, so that the next one says the same."""
    return any(x in str(error) for x in ("CUDA error", "busy or unavailable"))


if __name__ == "__main__":
    sys.exit(main())
