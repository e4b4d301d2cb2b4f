"""Kernels are compiled before they are needed, by processes that divide the work."""

import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_references import TRITON

from kvsearch_kernels import ahead

TOGETHER = """
import os, pathlib, sys, time
folder, end = pathlib.Path(sys.argv[-1]), time.monotonic() + 4
(folder / str(os.getpid())).touch()
while len(list(folder.iterdir())) < 2 and time.monotonic() < end:
    time.sleep(0.01)
raise SystemExit(len(list(folder.iterdir())) != 2)
"""
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_all_ops_with_a_kernel_are_compiled():
    assert {op.name: op for op in TRITON} == ahead.ops()


def test_processes_divide_the_work(tmp_path, monkeypatch):
    """Every case of every op is launched once, and one that fails costs only itself."""
    launched = []
    cases = {
        name: [((name, i), {}) for i in range(3 * i + 1)] for i, name in enumerate("abcdefghij")
    }
    monkeypatch.setattr(
        ahead, "import_module", lambda name: SimpleNamespace(cases=lambda *_: cases[name])
    )

    def run(impl, name, i):
        launched.append((name, i))
        if (name, i) == ("d", 4):
            raise RuntimeError("no such instruction")

    ops = {name: SimpleNamespace(probe=name, run=run) for name in cases}
    monkeypatch.setattr(ahead, "ops", lambda: ops)
    (tmp_path / "c.0").touch()  # another process has it
    monkeypatch.setattr(
        sys, "argv", ["ahead", "--device", "cpu", "--dtype", "float16", "--shared", str(tmp_path)]
    )
    assert ahead.main() == ahead.FAILED
    missing = {("c", 0), ("c", 1), ("c", 2), ("d", 5)}
    assert sorted(launched) == sorted({case for x in cases.values() for case, _ in x} - missing)
    launched.clear()
    assert ahead.main() == 0
    assert not launched


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("pass", (True, None)),
        (TOGETHER, (True, None)),
        (f"print('no such kernel', file=sys.stderr); sys.exit({ahead.FAILED})",
         (True, "no such kernel")),
        (f"print('no memory', file=sys.stderr); sys.exit({ahead.SHORT})", (False, "no memory")),
        (f"print('busy', file=sys.stderr); sys.exit({ahead.REFUSED})", (False, "busy")),
        ("import os; os._exit(9)", (False, "no reason given")),
        ("import time; time.sleep(60)", (False, "stopped after 5 s")),
    ],
)  # fmt: skip
def test_two_processes_share_a_folder_and_one_that_fails_or_hangs_is_told(code, found):
    command = [sys.executable, "-c", f"import sys; {code}"]
    assert ahead.side_by_side(command, 2, 5.0) == found


@pytest.mark.parametrize(
    ("error", "status", "tried"),
    [
        (torch.OutOfMemoryError("none left"), ahead.SHORT, 3),
        (torch.AcceleratorError("CUDA error: out of memory"), ahead.SHORT, 3),
        (RuntimeError("Triton Error [CUDA]: device kernel image is invalid"), ahead.FAILED, 3),
        (torch.AcceleratorError("CUDA error: an illegal memory access"), ahead.REFUSED, 1),
        (RuntimeError("CUDA-capable device(s) is/are busy or unavailable"), ahead.REFUSED, 1),
    ],
    ids=str,
)
def test_what_lacked_memory_or_a_gpu_is_worth_another_try(monkeypatch, error, status, tried):
    """A GPU that refuses one kernel refuses all; a lack of memory may be of one alone."""
    asked = []

    def run(impl):
        asked.append(impl)
        raise error

    monkeypatch.setattr(ahead, "ops", lambda: {n: SimpleNamespace(probe=n, run=run) for n in "abc"})
    cases = SimpleNamespace(cases=lambda *_: [((), {})])
    monkeypatch.setattr(ahead, "import_module", lambda name: cases)
    monkeypatch.setattr(sys, "argv", ["ahead", "--device", "cpu", "--only", "a,b,c"])
    assert ahead.main() == status
    assert len(asked) == tried


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A GPU that is asked for its name alone."""
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.delenv("KVSEARCH_TRITON", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H200")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 << 30, 80 << 30))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8), raising=False)


def test_they_are_compiled_once(gpu, monkeypatch):
    said, asked = [], []
    found = [(False, "no memory"), (True, "no such instruction")]

    def run(command, count, limit):
        asked.append((command[1:], count))
        return found.pop(0)

    monkeypatch.setattr(ahead, "side_by_side", run)
    for _ in range(3):
        ahead.compile_ahead(CUDA, torch.bfloat16, said.append)
    wanted = ["-m", "kvsearch_kernels.ahead", "--device", "cuda:0", "--dtype", "bfloat16"]
    # a process for each GB that is free; after a lack of memory it is tried again, but what does
    # not compile would not then
    assert asked == [(wanted, 3)] * 2
    assert said[0] == "compiling kernels for H200, which is needed once, in 3 processes"
    assert "(no memory); they are when they are needed" in said[1]
    assert "(no such instruction)" in said[3]
    monkeypatch.setattr(ahead, "side_by_side", lambda *_: pytest.fail("no reason to"))
    ahead.compile_ahead(CPU, torch.bfloat16, said.append)
    monkeypatch.setenv("KVSEARCH_TRITON", "0")
    ahead.compile_ahead(CUDA, torch.float16, said.append)
    monkeypatch.delenv("KVSEARCH_TRITON")
    with monkeypatch.context() as rocm:
        rocm.setattr(torch.version, "hip", "6.4")
        ahead.compile_ahead(CUDA, torch.float16, said.append)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 80 << 30))
    ahead.compile_ahead(CUDA, torch.float16, said.append)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 << 30, 80 << 30))
    ahead.compile_ahead(CUDA, torch.float64, said.append)
    assert len(said) == 4
    monkeypatch.setattr(ahead, "side_by_side", lambda *_: (True, None))
    ahead.compile_ahead(CUDA, torch.float32, said.append)
    assert said[-1].startswith("kernels are compiled: ")


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
def test_run_as_a_module_it_starts_itself(gpu, monkeypatch):
    """Its name is another then."""

    def start(command, **_):
        raise OSError(" ".join(command[1:]))

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(sys, "argv", ["ahead"])
    with pytest.raises(
        OSError, match=r"^-m kvsearch_kernels\.ahead --device cuda:0 --dtype bfloat16"
    ):
        runpy.run_module("kvsearch_kernels.ahead", run_name="__main__")


def test_the_mark_is_of_these_kernels(gpu, monkeypatch):
    one = ahead._mark(CUDA, torch.bfloat16)
    assert one is not None
    assert one != ahead._mark(CUDA, torch.float16)
    monkeypatch.setattr(Path, "read_bytes", lambda self: b"changed")
    assert one != ahead._mark(CUDA, torch.bfloat16)


def test_the_commands_have_them_compiled_on_a_gpu_alone(monkeypatch):
    from kvsearch.session import load

    asked = []
    monkeypatch.setattr(ahead, "compile_ahead", lambda *given: asked.append(given))
    for device in ("cpu", "cuda:1"):
        load.kernels(SimpleNamespace(device=device, dtype="bfloat16"), print)
    assert asked == [(torch.device("cuda", 1), torch.bfloat16, print)]
