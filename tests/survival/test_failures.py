"""Not a number, infinite, an exception, out of memory: a failed trial, never a dead study."""

from pathlib import Path

import numpy as np
import optuna
import pytest
import torch
from toy import WINDOWS, Session, Toy, searched, task

from kvsearch.errors import OutOfMemory, RunError
from kvsearch.policy import Policy
from kvsearch.policy_search.driver import Search
from kvsearch.policy_search.executors.inline import Inline
from kvsearch.policy_search.worker import Job, attempt
from kvsearch.results.folder import RunFolder
from kvsearch.results.pareto import front

PRUNED, COMPLETE = optuna.trial.TrialState.PRUNED, optuna.trial.TrialState.COMPLETE


@pytest.mark.parametrize("bad", ["nan", "inf", "raise", "oom"])
def test_what_goes_wrong_in_an_evaluator_is_a_failed_trial(bad: str, tmp_path: Path) -> None:
    session = Session(Toy(tmp_path / "log", 0.0, bad))
    folder = RunFolder(tmp_path / "run")
    search = Search(task(25), Inline(session), folder, lambda *_: None)
    trials = search.run()
    folder.close()
    failed = [t for t in trials if t.state == "failed"]
    done = [t for t in trials if t.state == "complete"]
    assert len(failed) >= 2 and len(done) >= 10 and session.forgot >= len(failed)
    word = {"nan": "not finite", "inf": "not finite", "raise": "as planned", "oom": "out of memory"}
    assert all(word[bad] in (t.error or "") for t in failed)
    assert all(t.dnll is None for t in failed)
    kept = {t.number: t for t in search.study.trials}
    for t in failed:
        if t.number >= 0:
            assert kept[t.number].state == PRUNED
            assert kept[t.number].constraints["fits"] > 0
    assert {t.state for t in kept.values()} <= {PRUNED, COMPLETE}
    best = {done[i].name for i in front([(t.bytes_peak, t.dnll) for t in done])}
    assert not best & {t.name for t in failed}


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "oom"),
        (torch.AcceleratorError("CUDA error: out of memory\nIt might be reported late"), "oom"),
        (RuntimeError("Triton Error [CUDA]: out of memory"), "oom"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublas`"), "oom"),
        (OutOfMemory("out of memory with windows of 9 tokens"), "oom"),
        (MemoryError(), "oom"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"), "oom"),
        (RuntimeError("shape mismatch"), "failed"),
        (KeyError("x"), "failed"),
    ],
)
def test_every_way_to_fail_is_an_outcome_and_the_session_stays(
    error: Exception, status: str
) -> None:
    class Broken:
        forgot = 0

        def run(self, job: Job) -> object:
            raise error

        def forget(self) -> None:
            self.forgot += 1

    session = Broken()
    outcome = attempt(session, Job(4, "search", Policy(slots=9)))
    assert (outcome.key, outcome.status, outcome.measured) == (4, status, None)
    assert outcome.error and "\n" not in outcome.error and session.forgot == 1


def test_when_nothing_works_the_run_says_so(tmp_path: Path) -> None:
    class Dead(Session):
        def run(self, job: Job) -> object:
            if job.policy.slots is not None:
                raise ValueError("the device is gone")
            return super().run(job)

    with pytest.raises(RunError, match="all failed: ValueError: the device is gone"):
        searched(tmp_path / "run", Dead(Toy(tmp_path / "log")), task(25))


def test_tpe_learns_to_avoid_what_runs_out_of_memory(tmp_path: Path) -> None:
    """Failures are PRUNED with a constraint; TPE ignores trials that FAIL and would repeat them."""
    shares = []
    for seed in (1, 2, 3):
        session = Session(Toy(tmp_path / f"log{seed}", 0.0, "oom"))
        what = task(80, seed=seed, together=WINDOWS)
        trials = searched(tmp_path / f"run{seed}", session, what)
        found = [t for t in trials if t.kind == "searched" and t.state in ("complete", "failed")]
        shares.append(np.mean([t.state == "failed" for t in found[-40:]]))
    by_chance = 1 / 7  # one of the seven scores of the space
    assert np.mean(shares) < by_chance
