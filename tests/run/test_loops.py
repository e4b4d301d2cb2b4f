"""Loops of decoding are compiled while a run evaluates."""

import multiprocessing
import os
import re
import time

import pytest

from kvsearch.run import compile_cpu_loops as loops
from kvsearch.run.compile_cpu_loops import compiling


@pytest.mark.slow
def test_what_decoding_needs_is_on_disk_when_it_is_wanted(monkeypatch, capfd) -> None:
    """Compiled now, or before: numba says of each loop from where it comes and where it goes."""
    pytest.importorskip("numba")
    monkeypatch.setenv("NUMBA_DEBUG_CACHE", "1")
    monkeypatch.setattr(loops, "LONGEST", 600.0)  # both cores may have other work
    with compiling(True) as compiled:
        compiled()
    kept = r"data (?:loaded from|saved to) '.*?([a-z_]+\.[a-z_]+)-[^/']+\.nbc'"
    found = {*re.findall(kept, capfd.readouterr().out)}
    assert {"step.step", "packing.vectors", "packing.pack", "reading.dequantize"} <= found


def test_it_ends_with_the_run_and_takes_no_core_from_it() -> None:
    before = set(multiprocessing.active_children())
    with compiling(True):
        (process,) = set(multiprocessing.active_children()) - before
        if hasattr(os, "sched_getscheduler"):
            until = time.monotonic() + 60
            while os.sched_getscheduler(process.pid) != os.SCHED_IDLE:
                assert process.is_alive() and time.monotonic() < until
                time.sleep(0.05)
    assert not process.is_alive()
    with compiling(False) as compiled:
        compiled()
        assert set(multiprocessing.active_children()) == before


def test_nobody_waits_for_an_idle_core_that_never_comes(monkeypatch) -> None:
    monkeypatch.setattr(loops, "LONGEST", 0.01)
    before = set(multiprocessing.active_children())
    with compiling(True) as compiled:
        compiled()
        assert set(multiprocessing.active_children()) == before
