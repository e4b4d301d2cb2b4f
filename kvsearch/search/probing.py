"""Sensitivity measured over all evaluators: each part is a job, and a killed one is repeated."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from kvsearch.errors import OutOfMemory, RunError
from kvsearch.evaluate.probes import Ask, Probe
from kvsearch.search.attempts import ATTEMPTS
from kvsearch.search.executors import Executor
from kvsearch.search.work import ProbeJob


def over(executor: Executor, part: str) -> Ask:
    """Answers about the windows of a text part, from all evaluators at once.

    Args:
        executor: where probes are answered; all of its slots are free.
        part: name of the text part.
    """

    def ask(
        probes: Sequence[Probe], progress: Callable[[], None] = lambda: None
    ) -> list[NDArray[np.float64]]:
        return answers(executor, part, probes, progress)

    return ask


def answers(
    executor: Executor, part: str, probes: Sequence[Probe], progress: Callable[[], None]
) -> list[NDArray[np.float64]]:
    """Answers to all probes, in their order.

    Raises:
        RunError: an answer failed, or its evaluator died three times over it, or none can be
            opened.
        OutOfMemory: a device has no room for one.
    """
    todo, found = dict(enumerate(probes)), dict[int, NDArray[np.float64]]()
    free, begun, windows = set(range(executor.slots)), Counter[int](), dict[int, int]()
    while len(found) < len(probes):
        while free and todo:
            slot = min(free)
            free.discard(slot)
            key = _next(todo, windows.get(slot))
            windows[slot] = todo[key].window
            begun[key] += 1
            executor.submit(slot, ProbeJob(key, part, todo.pop(key)))
        slot, outcome = executor.wait()
        free.add(slot)
        if outcome.answer is not None:
            found[outcome.key] = outcome.answer
            progress()
        elif outcome.status == "died" and begun[outcome.key] < ATTEMPTS:
            todo[outcome.key] = probes[outcome.key]
        else:
            while len(free) < executor.slots:  # whoever asks again, of less, finds all free
                free.add(executor.wait()[0])
            kind = OutOfMemory if outcome.status == "oom" else RunError
            raise kind(f"the sensitivity cannot be measured: {outcome.error}")
    return [found[i] for i in range(len(probes))]


def _next(todo: Mapping[int, Probe], last: int | None) -> int:
    """A probe of the window that the evaluator had last, or else of the one with most to do."""
    left = Counter(probe.window for probe in todo.values())
    window = last if last in left else max(left, key=lambda w: left[w])
    return next(key for key, probe in todo.items() if probe.window == window)
