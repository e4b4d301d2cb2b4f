"""The CPU loops of decoding, compiled while a long run evaluates, so that timing need not wait.

numba takes some twelve seconds for them the first time on a machine, on one core, and keeps them on
disk. A process that runs only when a core is idle takes what evaluators leave between jobs.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from tempfile import TemporaryFile

from kvsearch.policy_search.executors.parent_watch import die_with_parent, undisturbed
from kvsearch.policy_search.executors.spawning import stderr_into

LONGEST = 15.0  # seconds that an idle core needs for all of it

_SPAWN = multiprocessing.get_context("spawn")  # as for evaluators


@contextmanager
def compiling(wanted: bool) -> Iterator[Callable[[], None]]:
    """Compile the loops aside, if `wanted`; yields what waits until that is done.

    On a machine whose cores others keep busy it might never be: after `LONGEST` it is ended. What
    is missing then, or went wrong, is compiled where the loops are used.
    """
    if not wanted:
        yield lambda: None
        return
    process = _SPAWN.Process(target=_compile, daemon=True)
    with TemporaryFile() as file, undisturbed(), stderr_into(file):
        process.start()

    def end() -> None:
        process.kill()
        process.join()

    def wait() -> None:
        process.join(LONGEST)
        end()

    try:
        yield wait
    finally:
        end()


def _compile() -> None:
    """Run the probes of what a decoded token and a compaction use, which compiles it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver
    die_with_parent()
    _step_back()
    import torch

    from kvsearch_kernels.decode_step import decode_step
    from kvsearch_kernels.quantize_kv import dequantize_kv, quantize_kv
    from kvsearch_kernels.trust import prove

    torch.set_num_threads(1)
    for op in (decode_step, quantize_kv, dequantize_kv):
        with suppress(Exception):  # without numba, or on a full disk: see `compiling`
            prove(op, "numba", torch.device("cpu"), torch.float32)


def _step_back() -> None:
    """Run only when nobody else wants the core, or as nearly so as the system allows."""
    with suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        return
    with suppress(OSError, AttributeError):
        os.nice(19)
