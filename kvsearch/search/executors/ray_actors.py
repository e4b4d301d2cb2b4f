"""Jobs on a Ray cluster: core actors that load the model once, refilled one by one.

Not Ray Tune: there, an exception costs the model, a NaN leaves Optuna's trial running for ever, and
a killed driver leaves two truths (docs/search.md).
"""

from importlib.util import find_spec
from typing import Any

from kvsearch.errors import KvsearchError
from kvsearch.search.work import Job, Outcome, Session, Work, attempt


class RayActors:
    """One actor per slot.

    Args:
        work: picklable; opened once in every actor.
        slots: how many actors; 0 takes one per GPU of the cluster, or two without GPUs.
        address: of a cluster, or `local` to start one here.

    Raises:
        KvsearchError: Ray is not installed, or the cluster cannot be reached.
    """

    def __init__(self, work: Work, slots: int, address: str) -> None:
        if find_spec("ray") is None:
            raise KvsearchError("--ray needs Ray: pip install 'kvsearch[ray]'")
        import ray

        self._ray, self._started = ray, not ray.is_initialized()
        if self._started:
            _connect(ray, address, max(slots, 2))
        gpus = float(ray.cluster_resources().get("GPU", 0.0))
        self.slots = slots or int(gpus) or 2
        # a share of a GPU is bookkeeping, not memory: more actors than GPUs must fit together
        self._options = {"num_cpus": 0 if gpus else 1, "num_gpus": min(1.0, gpus / self.slots)}
        self._options |= {"max_restarts": 0, "max_concurrency": 1}
        self._work = ray.put(work)
        self._actors: dict[int, Any] = {}
        self._jobs: dict[Any, tuple[int, int]] = {}

    def submit(self, slot: int, job: Job) -> None:
        """Send a job; the actor starts with the slot's first one."""
        if slot not in self._actors:
            remote = self._ray.remote(_Evaluator).options(**self._options)
            self._actors[slot] = remote.remote(self._work, slot)
        self._jobs[self._actors[slot].run.remote(job)] = (slot, job.key)

    def wait(self) -> tuple[int, Outcome]:
        """Block until an actor answers or dies."""
        ready, _ = self._ray.wait(list(self._jobs), num_returns=1)
        slot, key = self._jobs.pop(ready[0])
        try:
            outcome: Outcome = self._ray.get(ready[0])
        except self._ray.exceptions.RayError as e:
            self._actors.pop(slot, None)
            what = (str(e).splitlines() or [type(e).__name__])[0]
            outcome = Outcome(key, "died", error=f"its evaluator died ({what[:160]})")
        return slot, outcome

    def close(self) -> None:
        """Kill the actors, and the local cluster if this started it."""
        for actor in self._actors.values():
            self._ray.kill(actor, no_restart=True)
        self._actors.clear()
        self._jobs.clear()
        if self._started and self._ray.is_initialized():
            self._ray.shutdown()


class _Evaluator:
    """The actor."""

    def __init__(self, work: Work, slot: int) -> None:
        self.work, self.slot = work, slot
        self.session: Session | None = None

    def run(self, job: Job) -> Outcome:
        """One job; the first one opens the work."""
        if self.session is None:
            try:
                self.session = self.work.open(self.slot)
            except KvsearchError as e:
                return Outcome(job.key, "failed", error=str(e))
        return attempt(self.session, job)


def _connect(ray: Any, address: str, cpus: int) -> None:
    quiet = {"logging_level": "error", "log_to_driver": False}
    try:
        if address == "local":
            ray.init(address="local", num_cpus=cpus, include_dashboard=False, **quiet)
        else:
            ray.init(address=address, **quiet)
    except Exception as e:
        text = " ".join(str(e).split())[:200]
        raise KvsearchError(f"cannot reach the Ray cluster {address!r}: {text}") from e
