"""Many evaluators: what a search begins when, and what it knows by then."""

from collections import deque
from pathlib import Path

from toy import GROWN, Session, Toy, task

from kvsearch.policy_search.driver import Search
from kvsearch.policy_search.job_loop import Evaluation
from kvsearch.policy_search.pacing import AT_ONCE
from kvsearch.policy_search.worker import Job, Outcome, attempt
from kvsearch.results.folder import RunFolder

SLOTS, TRIALS = 32, 40


class Fleet:
    """Evaluators of equal speed: what began first ends first. Notes who is under way."""

    def __init__(self, place: Path) -> None:
        self.session, self.slots = Session(Toy(place / "log", 0.0)), SLOTS
        self.jobs: deque[tuple[int, Job]] = deque()
        self.busy: list[int] = []

    def open(self) -> None:
        pass

    def submit(self, slot: int, job: Job) -> None:
        self.jobs.append((slot, job))

    def wait(self) -> tuple[int, Outcome]:
        self.busy.append(len(self.jobs))
        slot, job = self.jobs.popleft()
        return slot, attempt(self.session, job)

    def close(self) -> None:
        self.jobs.clear()


class Noted(Search):
    """Notes, whenever a trial begins, its kind and the kinds of those under way."""

    def __init__(self, place: Path) -> None:
        what = task(TRIALS, "kvei", windows=GROWN)
        self.noted: list[tuple[str, list[str]]] = []
        super().__init__(what, Fleet(place), RunFolder(place / "run"), lambda *_: None)

    def begun(self, evaluation: Evaluation) -> None:
        super().begun(evaluation)
        trial = evaluation.trial
        if trial is not None and not evaluation.first:
            beside = [t for t in self.state.under_way() if t.number != trial.number]
            self.noted.append((trial.kind, [t.kind for t in beside]))


def test_proposals_wait_for_methods_and_for_each_other_and_others_widen(tmp_path: Path) -> None:
    search = Noted(tmp_path)
    trials = search.run()
    search.folder.close()
    asked = [beside for kind, beside in search.noted if kind == "searched"]
    assert all(set(beside) <= {"searched"} for beside in asked)  # the methods have ended
    at_once = [1 + len(beside) for beside in asked]
    assert max(at_once) == AT_ONCE * TRIALS and at_once[-1] == 1
    assert sum(t.kind == "searched" and t.state == "complete" for t in trials) == TRIALS
    assert isinstance(search.executor, Fleet)
    busy = search.executor.busy[: -SLOTS - 1]
    assert sum(busy) / len(busy) > 0.15 * SLOTS  # contenders get windows meanwhile
