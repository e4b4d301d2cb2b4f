"""Jobs in this very process: the default, and the one that is easiest to debug."""

from collections import deque

from kvsearch.search.work import Job, Outcome, ProbeJob, Session, attempt


class Inline:
    """One slot; a job runs in `wait`.

    Args:
        session: an evaluator that is already open.
    """

    def __init__(self, session: Session) -> None:
        self.session, self.slots = session, 1
        self._jobs: deque[tuple[int, Job | ProbeJob]] = deque()

    def open(self) -> None:
        """It is."""

    def submit(self, slot: int, job: Job | ProbeJob) -> None:
        """Remember the job."""
        self._jobs.append((slot, job))

    def wait(self) -> tuple[int, Outcome]:
        """Run the oldest job."""
        slot, job = self._jobs.popleft()
        return slot, attempt(self.session, job)

    def close(self) -> None:
        """Forget jobs that did not run."""
        self._jobs.clear()
