"""Jobs on a Ray cluster: core actors that load the model once, refilled one by one.

Not through Ray Tune (`kvsearch.policy_search.ray_tune`): there an exception ends the actor with its
loaded model, and after a kill there are two records of the trials (docs/search.md).
"""

import contextlib
import math
from typing import Any

from kvsearch.errors import KvsearchError
from kvsearch.policy_search.executors.cluster import Cluster
from kvsearch.policy_search.executors.spawning import last_line
from kvsearch.policy_search.worker import Job, Outcome, Session, Work, attempt, why_unopened

STARTS = 3  # times in a row that a slot may die before it has opened its work
SHOWN = 160  # characters of Ray's messages


class RayActors:
    """One actor per slot.

    Args:
        work: picklable; opened once in every actor.
        slots: how many actors; 0 is as many as the cluster's GPUs serve, or two without GPUs.
        address: of a cluster, or `local` to start one here.
        each: GPUs of one actor, if several.

    Raises:
        KvsearchError: Ray is not installed, the cluster cannot be reached, or it is too small.
    """

    def __init__(self, work: Work, slots: int, address: str, each: int = 1) -> None:
        self._cluster = Cluster(address, slots or 2)
        self._ray = self._cluster.ray
        gpus, cpus = self._cluster.has("GPU"), self._cluster.has("CPU")
        if each > max(1, gpus // max(1, slots)):
            self.close()
            wanted = f"{slots} times {each}" if slots > 1 else str(each)
            raise KvsearchError(
                f"the Ray cluster has {gpus} GPUs: no room for {wanted} (--gpus-per-evaluator)"
            )
        self.slots = slots or gpus // each or 2
        if not gpus and self.slots > cpus:
            self.close()
            raise KvsearchError(f"the Ray cluster has {cpus} CPUs: no room for --workers {slots}")
        # Actors that share a GPU share its memory; Ray only counts, and 2/3 + 2/3 fit nowhere.
        share = 1 / math.ceil(self.slots / gpus) if gpus else 0.0
        share = share if each == 1 else float(each)
        self._actor = self._ray.remote(_Evaluator).options(
            num_cpus=0 if gpus else 1, num_gpus=share, max_restarts=0, max_concurrency=1
        )
        self._work = self._ray.put(work)
        self._actors: dict[int, tuple[Any, Any]] = {}  # slot -> actor, and whether it has opened
        self._refs: dict[Any, int] = {}
        self._jobs: dict[int, Job] = {}
        self._starts: dict[int, int] = {}

    def open(self) -> None:
        """Start the actors that never were; they load side by side."""
        for slot in range(self.slots):
            if slot not in self._starts:
                self._start(slot)

    def submit(self, slot: int, job: Job) -> None:
        """Send a job; an actor that has died starts again."""
        self._jobs[slot] = job
        if slot not in self._actors:
            self._start(slot)
        self._refs[self._actors[slot][0].run.remote(job)] = slot

    def wait(self) -> tuple[int, Outcome]:
        """Block until an actor answers or dies."""
        while True:
            ready, _ = self._ray.wait(list(self._refs), num_returns=1)
            slot = self._refs.pop(ready[0])
            job = self._jobs.pop(slot)
            try:
                outcome: Outcome = self._ray.get(ready[0])
            except self._ray.exceptions.RayError as e:
                what, again = why_lost(str(e) or type(e).__name__)
                opened = self._opened(slot)
                self._drop(slot)
                if not opened and not again:
                    error = f"evaluator {slot} could not start on the cluster: {what}"
                    return slot, Outcome(job.key, "unopened", error=error)
                if opened:
                    return slot, Outcome(job.key, "died", error=f"its evaluator died ({what})")
                if self._starts[slot] < STARTS:
                    self.submit(slot, job)
                    continue
                error = f"evaluator {slot} died {STARTS} times while it started ({what})"
                return slot, Outcome(job.key, "unopened", error=error)
            if outcome.status == "unopened":
                self._drop(slot)
            else:
                self._starts[slot] = 0
            return slot, outcome

    def close(self) -> None:
        """Kill the actors, and the local cluster if this started it."""
        for slot in list(getattr(self, "_actors", ())):
            self._drop(slot)
        self._cluster.close()

    def _start(self, slot: int) -> None:
        self._starts[slot] = self._starts.get(slot, 0) + 1
        actor = self._actor.remote(self._work, slot)
        self._actors[slot] = actor, actor.open.remote()

    def _opened(self, slot: int) -> bool:
        """Whether the actor had opened its work before it died."""
        try:
            self._ray.get(self._actors[slot][1], timeout=0)
        except self._ray.exceptions.RayError:  # a timeout is one too
            return False
        return True

    def _drop(self, slot: int) -> None:
        actor, _ = self._actors.pop(slot)
        with contextlib.suppress(Exception):  # it may be gone, and so may the cluster
            self._ray.kill(actor, no_restart=True)


def why_lost(message: str) -> tuple[str, bool]:
    """Why an actor was lost, and whether another one may start.

    Args:
        message: of Ray's error: of an actor that failed by itself, with a traceback.
    """
    if "error raised in its creation task" in message or "failed to import" in message:
        return last_line(message)[:SHOWN], False
    return message.splitlines()[0][:SHOWN], True


class _Evaluator:
    """The actor."""

    def __init__(self, work: Work, slot: int) -> None:
        self.work, self.slot, self.error = work, slot, ""
        self.session: Session | None = None

    def open(self) -> None:
        """Load what is needed, once."""
        try:
            self.session = self.work.open(self.slot)
        except Exception as e:
            self.error = why_unopened(e)

    def run(self, job: Job) -> Outcome:
        """One job."""
        if self.session is None:
            return Outcome(job.key, "unopened", error=self.error)
        return attempt(self.session, job)
