"""Jobs in this very process: the default, and the one that is easiest to debug."""

from kvsearch.errors import RunError
from kvsearch.policy_search.worker import Job, Outcome, Session, Unusable, attempt


class Inline:
    """One slot; a job runs in `wait`.

    Args:
        session: an evaluator that is already open.
    """

    def __init__(self, session: Session) -> None:
        self.session, self.slots = session, 1
        self._job: tuple[int, Job] | None = None
        self._refusal = ""

    def open(self) -> None:
        """It is."""

    def submit(self, slot: int, job: Job) -> None:
        """Remember the job."""
        self._job = slot, job

    def wait(self) -> tuple[int, Outcome]:
        """Run the job.

        A job that leaves the device unusable ends as `died`, which counts against it.

        Raises:
            RunError: the device has been unusable since the job before.
        """
        if self._refusal:
            raise RunError(self._refusal)
        assert self._job is not None, "nothing was submitted"
        slot, job = self._job
        try:
            return slot, attempt(self.session, job)
        except Unusable as e:
            what = f"policy {job.policy.name or job.key}"
            self._refusal = f"the GPU refuses all work after {what} ({e})"
            died = Outcome(job.key, "died", error=self._refusal)
            self._refusal += "; run the same command again to go on"
            return slot, died

    def close(self) -> None:
        """Forget a job that did not run."""
        self._job = None
