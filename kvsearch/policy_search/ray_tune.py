"""The same search inside Ray Tune, for people who use its tables; docs/search.md has its limits.

Tune runs the evaluations and keeps its own tables; what to propose, and what came of it, stays with
the driver. A searcher of our own takes OptunaSearch's place, which would leave a trial running for
ever after a NaN, has no way to say that a policy ran out of memory, and cannot be resumed with two
objectives.
"""

import os
from math import ceil
from typing import Any

from kvsearch.errors import KvsearchError, RunError
from kvsearch.policy import Policy
from kvsearch.policy_search.driver import Search
from kvsearch.policy_search.executors.cluster import Cluster
from kvsearch.policy_search.worker import Job, Outcome, Session, Work, attempt, why_unopened
from kvsearch.results.attempts import ATTEMPTS
from kvsearch.results.records import Trial

PENALTY = 100.0  # nats per token in Tune's table for a failed policy: finite, and worse than any
_QUIET = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # a CSV, a JSON and an event file per trial
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # Ctrl-C is ours
    "RAY_AIR_NEW_OUTPUT": "0",
}


def run(search: Search, work: Work, *, slots: int, address: str) -> list[Trial]:
    """Run a search that has not begun yet with Tune's actors; its policies start on all windows.

    Args:
        search: its own executor measures the full cache first.
        work: opened once in every actor; actors are used again.
        slots: trials at once; 0 takes one per GPU of the cluster, or two.
        address: of a Ray cluster, or `local`.

    Raises:
        KvsearchError: Ray is not installed or cannot be reached.
        RunError: as for `Search.run`.
    """
    assert search.task.together >= search.task.windows, "Tune sees one result per trial"
    os.environ.update({k: v for k, v in _QUIET.items() if k not in os.environ})
    search.prepare()
    cluster = Cluster(address, slots or 2)
    try:
        try:
            from ray import tune
            from ray.tune.search import Searcher
        except ImportError as e:
            raise KvsearchError("Ray Tune is not installed: pip install 'kvsearch[ray]'") from e
        slots = slots or cluster.has("GPU") or 2
        share = 1 / ceil(slots / cluster.has("GPU")) if cluster.has("GPU") else 0.0
        bridge = _Bridge(search, Searcher.FINISHED)
        trainable = tune.with_parameters(_trainable(tune), work=work)
        tune.Tuner(
            tune.with_resources(trainable, {"cpu": 0 if share else 1, "gpu": share}),
            tune_config=tune.TuneConfig(
                search_alg=_searcher(Searcher, bridge),
                num_samples=-1,  # until the searcher ends the run
                max_concurrent_trials=slots,
                reuse_actors=True,
            ),
            run_config=tune.RunConfig(
                name="tune",
                storage_path=str(search.folder.path.resolve()),
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
                failure_config=tune.FailureConfig(max_failures=ATTEMPTS - 1),
                callbacks=[_callback(tune, bridge)],
                verbose=0,
            ),
        ).fit()
        if bridge.error is not None:
            raise bridge.error
        return search.trials
    except (KeyboardInterrupt, RunError):
        search.loop.release()
        raise
    finally:
        cluster.close()


class _Bridge:
    """Between Tune's trials and the driver's."""

    def __init__(self, search: Search, finished: str) -> None:
        self.search, self.finished = search, finished
        self.error: Exception | None = None
        self.slots: dict[str, int] = {}  # Tune's trial -> our slot
        self.outcomes: dict[str, Outcome] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return str, ()  # Tune pickles its searcher; ours is the run folder, and that is kept

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        """What an evaluation needs; None if it has to wait for another, or that all are made."""
        slot = next(i for i in range(len(self.slots) + 1) if i not in self.slots.values())
        try:
            job = None if self.error else self.search.loop.take(slot)
        except Exception as e:
            self.error, job = e, None
        if job is None:
            return None if self.search.loop.running and not self.error else self.finished
        self.slots[trial_id] = slot
        policy = job.policy.to_json()
        return {
            "key": job.key,
            "part": job.part,
            "policy": policy,
            "windows": job.windows,
            "first": job.first,
        }

    def complete(self, trial_id: str) -> None:
        slot = self.slots.pop(trial_id)
        key = self.search.loop.running[slot].number
        gone = Outcome(key, "failed", error=f"its actor died or raised {ATTEMPTS} times")
        try:
            self.search.loop.give(slot, self.outcomes.pop(trial_id, gone))
        except Exception as e:
            self.error = self.error or e


def _searcher(base: Any, bridge: _Bridge) -> Any:
    class DriverSearch(base):
        """Proposes what the driver proposes."""

        def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
            return bridge.suggest(trial_id)

        def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
            bridge.complete(trial_id)

        def save(self, checkpoint_path: str) -> None:
            """Nothing: the run folder is the state."""

        def restore(self, checkpoint_path: str) -> None:
            """Nothing: the run folder is the state."""

    return DriverSearch()


def _callback(tune: Any, bridge: _Bridge) -> Any:
    class Keep(tune.Callback):
        """Takes the outcome out of a result before Tune writes it anywhere."""

        def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: Any) -> None:
            bridge.outcomes[trial.trial_id] = result.pop("outcome")

    return Keep()


def _trainable(tune: Any) -> Any:
    class Evaluate(tune.Trainable):
        """One result per policy, also for a failure, so that the actor stays."""

        def setup(self, config: dict[str, Any], work: Work) -> None:
            self.work = work
            self.session: Session | None = None

        def reset_config(self, new_config: dict[str, Any]) -> bool:
            return True

        def step(self) -> dict[str, Any]:
            c = self.config
            policy = Policy.parse(c["policy"])
            job = Job(c["key"], c["part"], policy, c["windows"], first=c["first"])
            outcome = self._run(job)
            ok = outcome.measured is not None
            nll = float(outcome.measured.nll.mean()) if outcome.measured is not None else PENALTY
            return {"nll": nll, "feasible": ok, "outcome": outcome, "done": True}

        def save_checkpoint(self, checkpoint_dir: str) -> None:
            """Nothing: a policy is evaluated in one step."""

        def load_checkpoint(self, checkpoint: Any) -> None:
            """Nothing."""

        def _run(self, job: Job) -> Outcome:
            if self.session is None:
                try:
                    self.session = self.work.open(0)  # Ray shows it its own device
                except Exception as e:
                    return Outcome(job.key, "unopened", error=why_unopened(e))
            return attempt(self.session, job)

    return Evaluate
