"""Measuring a fixed list of policies on one part of the text, over all slots."""

import contextlib
from collections.abc import Callable, Sequence

from kvsearch.errors import RunError
from kvsearch.knobs import Setting
from kvsearch.policy import Policy
from kvsearch.search.executors import Executor
from kvsearch.search.folder import RunFolder
from kvsearch.search.work import Job, Outcome

PART = "search"
ATTEMPTS = 3


def measure(
    executor: Executor,
    folder: RunFolder,
    part: str,
    policies: Sequence[Policy],
    setting: Setting,
    *,
    resident: bool = True,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, str]:
    """Bring the NLL of every policy on a part into the folder; what is there is not done again.

    A policy that kills its evaluator three times, or the driver with it, is left out from then on.

    Args:
        executor: where evaluations run; all of its slots are free.
        folder: where NLL and resident bytes go.
        part: name of the text part, also in the folder.
        policies: what to measure; equal ones once.
        setting: shape, and tokens of a window.
        resident: also count the bytes of the packed cache.
        progress: called with the name of every policy that is done.

    Returns:
        Why a policy could not be measured, by its fingerprint.

    Raises:
        RunError: no evaluator could be opened, or the full cache could not be measured; nothing
            can be compared then.
    """
    keyed = {p.fingerprint(setting.shape.layers): p for p in policies}
    full = Policy().fingerprint(setting.shape.layers)
    todo, failures, tries = [], dict[str, str](), dict[str, int]()
    for key, policy in keyed.items():
        # without the full cache there is no run: whoever kills that driver, it is tried again
        tries[key] = 0 if key == full else folder.tries(part, key)
        if folder.has_nll(part, key):
            folder.set_tries(part, key, 0)  # a kill can come between the two
        elif tries[key] < ATTEMPTS:
            todo.append((key, policy))
            continue
        else:
            failures[key] = f"killed {ATTEMPTS} times while it was evaluated"
        progress(policy.name or key)
    queue = list(range(len(todo)))
    running: dict[int, int] = {}

    def tried(i: int, by: int) -> None:
        key = todo[i][0]
        tries[key] += by
        if key != full:
            folder.set_tries(part, key, tries[key])

    try:
        while queue or running:
            while queue and len(running) < executor.slots:
                i = queue.pop(0)
                slot = min(set(range(executor.slots)) - set(running))
                running[slot] = i
                tried(i, 1)
                executor.submit(slot, Job(i, part, todo[i][1], setting.tokens, resident=resident))
            slot, outcome = executor.wait()
            if outcome.status == "unopened":
                raise RunError(outcome.error)
            i = running.pop(slot)
            key, policy = todo[i]
            if outcome.status == "died" and tries[key] < ATTEMPTS:
                queue.insert(0, i)
                continue
            if outcome.measured is None:
                failures[key] = outcome.error or "its evaluator died"
            else:
                _keep(folder, part, key, policy, outcome)
            if outcome.status != "died":
                tried(i, -tries[key])
            progress(policy.name or key)
    except (KeyboardInterrupt, RunError):
        with contextlib.suppress(RunError):  # the disk may be full
            for i in running.values():  # stopping is no policy's fault
                tried(i, -1)
        raise
    if full in failures:
        raise RunError(f"the full cache cannot be evaluated: {failures[full]}")
    return failures


def _keep(folder: RunFolder, part: str, key: str, policy: Policy, outcome: Outcome) -> None:
    measured = outcome.measured
    assert measured is not None
    about = {
        "name": policy.name,
        "bytes_resident": measured.bytes_resident,
        "seconds": outcome.seconds,
        "impls": measured.impls,
    }
    folder.save_nll(part, key, measured.nll, about)
