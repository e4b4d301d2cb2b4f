"""The search: ask, build, reject or evaluate, record, tell. One plain loop.

A policy over budget costs nothing: its bytes are exact. A policy seen before is told its old
values. What was measured is on disk before Optuna hears of it, so a kill loses one evaluation.
"""

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import optuna
from numpy.typing import NDArray

from kvsearch.errors import KvsearchError, PolicyError
from kvsearch.evaluate.quality import Evaluator, check_finite
from kvsearch.knobs import Setting, Value, build
from kvsearch.methods import METHODS
from kvsearch.pareto import front
from kvsearch.policy import Policy, layout
from kvsearch.records import Kind, Trial
from kvsearch.search.folder import RunFolder
from kvsearch.search.propose import breed, make_study
from kvsearch.space import SearchSpace
from kvsearch.stats import standard_error

BRED = 0.85  # share of free proposals that are bred, the rest is Optuna's
RUNG = 0.25  # share of each window that a free proposal must survive first
SURE = 4.0  # standard errors by which it must be behind to be stopped there
BEST = 6  # parents: the best within the budget, or now and then the front


@dataclass(frozen=True)
class Task:
    """What the search is about.

    Attributes:
        setting: shape, budget and length.
        windows: search text `[W, T]`.
        score_from: first scored position; before it no cache is full.
        space: where to look.
        trials: free proposals to evaluate, beyond the methods.
        seed: of sampler and neighbours.
    """

    setting: Setting
    windows: NDArray[np.int64]
    score_from: int
    space: SearchSpace
    trials: int
    seed: int


Watch = Callable[[Trial, list[Trial]], None]


class Search:
    """Runs a task in a folder, and picks up where an earlier run of it stopped."""

    def __init__(self, task: Task, evaluator: Evaluator, folder: RunFolder, watch: Watch) -> None:
        self.task, self.evaluator, self.folder, self.watch = task, evaluator, folder, watch
        self.trials = folder.trials()
        self.points: dict[str, dict[str, Value]] = {}
        self.full = self._full_nll()

    def run(self) -> list[Trial]:
        """Evaluate the methods, then `trials` free proposals; returns all trials of the folder."""
        study = make_study(self.task.seed)
        rng = random.Random(self.task.seed)
        replay = {t.number: t for t in self.trials}
        queue = [
            (n, m.kind, m.knobs) for n, m in METHODS.items() if m.baseline and m.kind != "full"
        ]
        for name, kind, knobs in queue:
            params = self.task.space.params(knobs)
            if params is None:
                self._outside(name, "composite" if kind == "composite" else "method", knobs)
            else:
                study.enqueue_trial(params, user_attrs={"name": name, "kind": kind})
        spent, misses = 0.0, 0  # whole evaluations paid for; proposals that cost nothing
        while spent < self.task.trials and misses < 50 * (self.task.trials + 1):
            waiting = any(t.state == optuna.trial.TrialState.WAITING for t in study.trials)
            if not waiting and rng.random() < BRED:
                point = breed(self.task.space, self._parents(rng.random() < 0.25), rng)
                if point is not None:
                    study.enqueue_trial(point)
            trial = study.ask()
            knobs = self.task.space.suggest(trial)
            done = replay.get(trial.number) or self._one(trial, knobs)
            if trial.number not in replay:
                self.trials.append(done)
                self.folder.append(done)
                self.watch(done, self.trials)
            self._tell(study, trial, done, knobs)
            if done.state in ("rejected", "duplicate"):
                misses += 1
            elif done.kind == "found":
                spent += RUNG if done.state == "pruned" else 1
        return self.trials

    def _outside(self, name: str, kind: Kind, knobs: Mapping[str, Value]) -> None:
        """Evaluate a method that the space does not contain; Optuna never hears of it."""
        if any(t.name == name for t in self.trials):
            return
        number = -1 - sum(t.number < 0 for t in self.trials)
        done = self._evaluate(number, name, kind, knobs)
        self.trials.append(done)
        self.folder.append(done)
        self.watch(done, self.trials)

    def _one(self, trial: optuna.Trial, knobs: dict[str, Value]) -> Trial:
        name = trial.user_attrs.get("name", f"trial {trial.number}")
        kinds: dict[str, Kind] = {"single": "method", "composite": "composite"}
        return self._evaluate(
            trial.number, name, kinds.get(trial.user_attrs.get("kind", ""), "found"), knobs
        )

    def _evaluate(self, number: int, name: str, kind: Kind, knobs: Mapping[str, Value]) -> Trial:
        """Build and measure one policy; every way to fail ends in a record."""
        task, shape = self.task, self.task.setting.shape
        start = time.perf_counter()
        policy = Policy(name=name)
        fingerprint = ""
        peak: int | None = None
        try:
            if reason := task.space.forbidden(knobs):
                raise PolicyError(reason)
            policy = build(knobs, task.setting, name=name)
            policy.check(shape)
            fingerprint = policy.fingerprint(shape.layers)
            peak = layout(policy, shape).bytes_peak(task.setting.tokens)
            if task.setting.budget is not None and peak > task.setting.budget and kind == "found":
                raise PolicyError(f"{peak} bytes are over the budget of {task.setting.budget}")
        except PolicyError as e:
            return Trial(number, name, kind, "rejected", policy, fingerprint, error=str(e))
        twin = next(
            (t for t in self.trials if t.fingerprint == fingerprint and t.nll is not None), None
        )
        if twin is not None:
            return Trial(
                number,
                name,
                kind,
                "duplicate",
                policy,
                fingerprint,
                twin.nll,
                twin.dnll,
                peak,
                error=f"same policy as {twin.name}",
            )
        try:
            if kind == "found" and (reason := self._hopeless(policy, fingerprint, peak)):
                return Trial(
                    number, name, kind, "pruned", policy, fingerprint, bytes_peak=peak,
                    seconds=time.perf_counter() - start, error=reason,
                )  # fmt: skip
            nll = self._search_nll(name, policy, fingerprint)
        except KvsearchError as e:
            return Trial(
                number, name, kind, "failed", policy, fingerprint, bytes_peak=peak, error=str(e)
            )
        scored = nll[:, task.score_from - 1 :]
        return Trial(
            number,
            name,
            kind,
            "complete",
            policy,
            fingerprint,
            nll=float(scored.mean()),
            dnll=float((scored - self.full[:, task.score_from - 1 :]).mean()),
            bytes_peak=peak,
            seconds=time.perf_counter() - start,
        )

    def _hopeless(self, policy: Policy, fingerprint: str, peak: int) -> str | None:
        """Why a policy is not worth a whole evaluation, judged on the first part of each window.

        It is stopped when, token by token, it is clearly behind the best policy that uses no more
        bytes; the future does not change what was lost (no policy sees it), it may add to it.
        """
        rung = int(RUNG * self.task.windows.shape[1])
        start = self.task.score_from - 1
        rivals = [
            t
            for t in self.trials
            if t.state == "complete" and t.dnll is not None and (t.bytes_peak or 0) <= peak
        ]
        if not rivals or rung < start + 256 or self.folder.has_nll("search", fingerprint):
            return None
        best = min(rivals, key=lambda t: t.dnll or 0.0)
        mine = self.evaluator.quality(policy, self.task.windows[:, :rung], resident=False).nll
        theirs = self.folder.load_nll("search", best.fingerprint)[0][:, : rung - 1]
        behind = mine[:, start:] - theirs[:, start:]
        mean, error = float(behind.mean()), standard_error(behind)
        if not mean - SURE * error > 0:
            return None
        return f"stopped after {rung} tokens, {mean:.3f} +- {error:.3f} nats behind {best.name}"

    def _full_nll(self) -> NDArray[np.float32]:
        return self._search_nll(
            "full", Policy(), Policy().fingerprint(self.task.setting.shape.layers)
        )

    def _search_nll(self, name: str, policy: Policy, fingerprint: str) -> NDArray[np.float32]:
        """NLL on the search text; a kill after it was saved does not cost it again."""
        if not self.folder.has_nll("search", fingerprint):
            quality = self.evaluator.quality(policy, self.task.windows, resident=False)
            check_finite(name, quality)
            self.folder.save_nll("search", fingerprint, quality.nll, {"name": name})
        return self.folder.load_nll("search", fingerprint)[0]

    def _tell(
        self, study: optuna.Study, trial: optuna.Trial, done: Trial, knobs: dict[str, Value]
    ) -> None:
        if done.dnll is None or done.bytes_peak is None:
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            return
        study.tell(trial, [done.dnll, float(done.bytes_peak)])
        self.points[done.fingerprint] = knobs

    def _parents(self, from_front: bool) -> list[dict[str, Value]]:
        """Knobs of the best policies within the budget, or of those on the front, best first."""
        done = [
            t
            for t in self.trials
            if t.dnll is not None and t.bytes_peak is not None and t.fingerprint in self.points
        ]
        if from_front:
            chosen = [done[i] for i in front([(t.bytes_peak or 0.0, t.dnll or 0.0) for t in done])]
        else:
            limit = self.task.setting.budget
            within = [t for t in done if limit is None or (t.bytes_peak or 0) <= limit]
            chosen = sorted(within, key=lambda t: t.dnll or 0.0)
            chosen = list({t.fingerprint: t for t in reversed(chosen)}.values())[::-1][:BEST]
        return [self.points[t.fingerprint] for t in (chosen[::-1] if from_front else chosen)]
