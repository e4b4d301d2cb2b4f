"""Evaluators keep what they free: the kernel clears no page twice."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvsearch.models.allocator import KEPT, keep_freed

SIZE, PAGE = 64 << 20, 4096
assert SIZE < KEPT

SCRIPT = f"""
import resource, sys
import torch
from kvsearch.models.allocator import keep_freed
if sys.argv[1] == "kept":
    assert keep_freed()
for _ in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.empty({SIZE}, dtype=torch.uint8).fill_(1)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults)
"""


def faults(how: str) -> int:
    """Page faults of a tensor of 64 MiB after three like it."""
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, check=True
    )
    return int(run.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts faults as Linux does")
def test_a_freed_tensor_is_used_again() -> None:
    if not keep_freed_is_there():
        pytest.skip("this C library has no mallopt")
    assert faults("default") > SIZE // PAGE // 8  # huge pages need fewer
    assert faults("kept") < 100


def keep_freed_is_there() -> bool:
    run = [sys.executable, "-c", "from kvsearch.models.allocator import *; print(keep_freed())"]
    return subprocess.run(run, capture_output=True, text=True, check=True).stdout == "True\n"


def test_an_evaluator_on_a_cpu_asks_for_it(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvsearch.search import model_work

    asked = []
    monkeypatch.setattr(model_work, "keep_freed", lambda: asked.append(True))
    model_work.ModelWork(str(tiny_folder), "float32", ("cpu",), {}).open(0)
    assert asked


def test_without_glibc_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvsearch.models.allocator.ctypes.CDLL", lambda _: object())
    assert not keep_freed()
