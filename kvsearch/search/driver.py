"""The search: one driver owns the study, evaluators only evaluate.

A slot is refilled the moment it is free. What a job measured is on disk before Optuna hears of it,
so a kill costs the evaluations in flight and nothing else. A policy over budget costs nothing: its
bytes are exact. A policy seen before is told its old values.
"""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import optuna
from numpy.typing import NDArray

from kvsearch.errors import RunError
from kvsearch.knobs import Value
from kvsearch.policy import Policy
from kvsearch.records import Kind, Trial
from kvsearch.search import race
from kvsearch.search.executors import Executor
from kvsearch.search.folder import RunFolder
from kvsearch.search.measure import PART, measure
from kvsearch.search.rivals import Rivals
from kvsearch.search.study import Study
from kvsearch.search.task import Task, admitted, baselines
from kvsearch.search.work import Job, Outcome

ATTEMPTS = 3  # a trial whose evaluator dies this often is given up
HOPELESS = 5  # failures in a row, without one success, that end a run

Watch = Callable[[Trial, list[Trial]], None]


@dataclass
class Flight:
    """A trial that an evaluator has."""

    trial: Trial
    rungs: tuple[race.Rung, ...]
    rung: int = 0
    tokens: int = 0
    seconds: float = 0.0
    seen: list[tuple[int, int, float]] = field(default_factory=list)


class Search:
    """Runs a task in a folder, and picks up where an earlier run of it stopped.

    Args:
        task: what to do.
        executor: where evaluations run; the caller closes it.
        folder: where everything is kept.
        watch: told of every finished trial.
    """

    def __init__(self, task: Task, executor: Executor, folder: RunFolder, watch: Watch) -> None:
        self.task, self.executor, self.folder, self.watch = task, executor, folder, watch
        self.trials = folder.trials()
        self.flights: dict[int, Flight] = {}  # by slot
        limit = task.setting.budget_bytes
        self.study = Study(task.space, task.sampler, task.seed, limit, task.speed is not None)
        self._interrupted = folder.running()
        self.study.restore([*self.trials, *self._interrupted])
        self._rivals = Rivals(task.setting.shape, task.score_from, task.setting.tokens, self._load)
        known = {t.name for t in [*self.trials, *self._interrupted]}
        self._methods = [(n, m) for n, m in baselines(task.warm, task.without) if n not in known]
        self._misses = sum(t.state in ("rejected", "duplicate") for t in self.trials)

    def run(self) -> list[Trial]:
        """Evaluate the methods, then `trials` free proposals; returns all trials of the folder.

        Raises:
            RunError: nothing works, or the folder cannot be written.
        """
        self.begin()
        free = set(range(self.executor.slots))
        try:
            while True:
                while free and (job := self.take(min(free))) is not None:
                    slot = min(free)
                    free.discard(slot)
                    self.executor.submit(slot, job)
                if not self.flights:
                    return self.trials
                slot, outcome = self.executor.wait()
                if (job := self.give(slot, outcome)) is not None:
                    self.executor.submit(slot, job)
                else:
                    free.add(slot)
        except (KeyboardInterrupt, RunError):
            self.lay_down()
            raise

    def begin(self) -> None:
        """Measure the full cache, which everything is compared with."""
        full = Policy(name="full")
        measure(self.executor, self.folder, PART, [full], self.task.setting, resident=False)
        self.full = self._load(full.fingerprint(self.task.setting.shape.layers))

    def take(self, slot: int) -> Job | None:
        """The next job for a free slot, or None when there is nothing to start now."""
        flight = self._next()
        if flight is None:
            return None
        self.flights[slot] = flight
        return self._job(flight)

    def give(self, slot: int, outcome: Outcome) -> Job | None:
        """Take in what a slot says; its trial's next job, or None if the slot is free again.

        Raises:
            RunError: nothing works, or the folder cannot be written.
        """
        job = self._after(self.flights[slot], outcome)
        if job is None:
            del self.flights[slot]
        return job

    def lay_down(self) -> None:
        """Stopping for a reason that is no trial's fault does not count as one of its attempts."""
        mine = {f.trial.number for f in self.flights.values()}
        with contextlib.suppress(RunError):  # the disk may be full
            for t in self.folder.running():  # not our own list: a stop can come between two lines
                if t.number in mine:
                    self.folder.append(replace(t, attempt=t.attempt - 1))

    # -- what comes next -----------------------------------------------------------------------

    def _next(self) -> Flight | None:
        """The next trial that costs an evaluation, or None when there is nothing to start."""
        while True:
            if self._interrupted:
                before = self._interrupted.pop(0)
                trial: Trial | None = self._again(before)
            elif self._methods:
                name, method = self._methods.pop(0)
                kind: Kind = "combined" if method.kind == "combined" else "method"
                trial = self._method(name, kind, method.knobs)
            elif self._wanted():
                asked, knobs = self.study.ask()
                trial = self._check(asked, f"trial {asked.number}", "searched", knobs)
            else:
                return None
            if trial is None:
                continue
            flight = Flight(trial, self._rungs(trial))
            if not self._known(flight):
                return flight

    def _wanted(self) -> bool:
        """Whether another free proposal should be started."""
        spent = sum(
            t.kind == "searched" and t.state in ("complete", "pruned", "failed")
            for t in self.trials
        )
        spent += sum(f.trial.kind == "searched" for f in self.flights.values())
        return spent < self.task.trials and self._misses < 50 * (self.task.trials + 1)

    def _again(self, before: Trial) -> Trial | None:
        """A trial that was under way when the driver or its evaluator was killed."""
        if self.folder.has_nll(PART, before.fingerprint):
            return before  # killed after its NLL was saved: `_known` finishes it
        if before.attempt >= ATTEMPTS:
            error = f"killed {ATTEMPTS} times while it was evaluated"
            self._finish(replace(before, state="failed", error=error))
            return None
        return self._begin(replace(before, attempt=before.attempt + 1))

    def _method(self, name: str, kind: Kind, knobs: Mapping[str, Value]) -> Trial | None:
        params = self.task.space.params(knobs)
        if params is not None:
            asked, knobs = self.study.ask(params)
            return self._check(asked, name, kind, knobs)
        numbers = [t.number for t in self.trials] + [f.trial.number for f in self.flights.values()]
        return self._check(min([0, *numbers]) - 1, name, kind, knobs)  # Optuna never hears of it

    def _check(
        self, asked: optuna.Trial | int, name: str, kind: Kind, knobs: Mapping[str, Value]
    ) -> Trial | None:
        """Start a proposal, or finish it at once where that costs nothing."""
        inside = isinstance(asked, optuna.Trial)
        number = asked.number if isinstance(asked, optuna.Trial) else asked
        system = self.study.trials[number].system_attrs if inside else {}
        noted = {k: v for k, v in system.items() if k != "fixed_params"}
        trial = admitted(self.task, number, name, kind, knobs, noted)
        if trial.state == "rejected":
            self._finish(trial)
            return None
        twin = self._twin(trial.fingerprint)
        if twin is not None and twin.state == "failed":  # it may have killed its evaluator
            error = f"same policy as {twin.name}, which failed"
            self._finish(replace(trial, state="rejected", error=error))
            return None
        if twin is not None:
            same: dict[str, Any] = {"nll": twin.nll, "dnll": twin.dnll, "rungs": twin.rungs}
            error = f"same policy as {twin.name}"
            self._finish(replace(trial, state="duplicate", error=error, **same))
            return None
        return self._begin(trial)

    def _twin(self, fingerprint: str) -> Trial | None:
        under_way = [f.trial for f in self.flights.values()]
        return next(
            (
                t
                for t in [*self.trials, *under_way, *self._interrupted]
                if t.fingerprint == fingerprint
                and t.state in ("complete", "pruned", "running", "failed")
            ),
            None,
        )

    # -- what happens to it --------------------------------------------------------------------

    def _begin(self, trial: Trial) -> Trial:
        self.folder.append(trial)
        return trial

    def _rungs(self, trial: Trial) -> tuple[race.Rung, ...]:
        t = self.task
        looks = race.rungs(trial.policy, t.setting.tokens, t.score_from, t.windows, t.together)
        return looks if t.racing else looks[-1:]

    def _known(self, flight: Flight) -> bool:
        """Finish a trial whose NLL was saved just before a kill."""
        if not self.folder.has_nll(PART, flight.trial.fingerprint):
            return False
        nll, about = self.folder.load_nll(PART, flight.trial.fingerprint)
        flight.tokens, flight.seconds = about.get("tokens", 0), about.get("seconds", 0.0)
        self._complete(flight, nll)
        return True

    def _job(self, f: Flight) -> Job:
        windows, stop = f.rungs[f.rung]
        return Job(f.trial.number, PART, f.trial.policy, stop, windows)

    def _after(self, f: Flight, outcome: Outcome) -> Job | None:
        """What follows from an outcome; a job if the trial goes on, or begins again."""
        f.seconds += outcome.seconds
        if outcome.status == "unopened":
            raise RunError(outcome.error)
        if outcome.measured is None:
            if outcome.status == "died" and f.trial.attempt < ATTEMPTS:
                f.trial = self._begin(replace(f.trial, attempt=f.trial.attempt + 1))
                f.rung, f.seen = 0, []
                return self._job(f)
            self._failed(f, outcome)
            return None
        f.tokens += outcome.measured.tokens
        nll, last = outcome.measured.nll, f.rung == len(f.rungs) - 1
        about = {"name": f.trial.name, "tokens": f.tokens, "seconds": f.seconds}
        if last:
            self.folder.save_nll(PART, f.trial.fingerprint, nll, about)
            self._complete(f, nll)
            return None
        f.seen.append((*f.rungs[f.rung], self._dnll(nll)))
        if reason := self._rivals.verdict(f.trial, nll, self.trials):
            self.folder.save_nll(f"{PART}-stopped", f.trial.fingerprint, nll, about)
            self._finish(self._done(f, state="pruned", rungs=tuple(f.seen), error=reason))
            return None
        f.rung += 1
        return self._job(f)

    def _complete(self, f: Flight, nll: NDArray[np.float32]) -> None:
        start = self.task.score_from - 1
        looks = f.rungs if self.task.racing else ()
        self._finish(
            self._done(
                f,
                state="complete",
                nll=float(nll[:, start:].mean()),
                dnll=self._dnll(nll),
                rungs=tuple((w, t, self._dnll(nll[:w, : t - 1])) for w, t in looks),
            )
        )

    def _failed(self, f: Flight, outcome: Outcome) -> None:
        error = outcome.error or "its evaluator died"
        self._finish(self._done(f, state="failed", error=error))
        worked = any(t.state in ("complete", "pruned") for t in self.trials)
        failures = [t for t in self.trials if t.state == "failed"]
        if not worked and len(failures) >= HOPELESS:
            raise RunError(f"the first {len(failures)} policies all failed: {failures[0].error}")

    def _done(self, f: Flight, **how: Any) -> Trial:
        return replace(f.trial, tokens=f.tokens, seconds=f.seconds, **how)

    def _finish(self, trial: Trial) -> None:
        """Write a finished trial, then tell Optuna, then whoever watches."""
        self.folder.append(trial)
        self.trials.append(trial)
        if trial.number >= 0:
            self.study.tell(trial)
        self._misses += trial.state in ("rejected", "duplicate")
        self.watch(trial, self.trials)

    # -- comparing -----------------------------------------------------------------------------

    def _dnll(self, nll: NDArray[np.float32]) -> float:
        start = self.task.score_from - 1
        full = self.full[: len(nll), start : nll.shape[1]]
        return float((nll[:, start:] - full).mean())

    def _load(self, fingerprint: str) -> NDArray[np.float32]:
        return self.folder.load_nll(PART, fingerprint)[0]
