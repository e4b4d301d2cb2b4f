"""Measuring a fixed list of policies on one part of the text, over all slots."""

from collections.abc import Callable, Sequence

from kvsearch.errors import RunError
from kvsearch.policy import Policy
from kvsearch.policy_search.executors import Executor
from kvsearch.policy_search.job_loop import Evaluation, Loop
from kvsearch.policy_space import Setting
from kvsearch.results.attempts import ATTEMPTS
from kvsearch.results.folder import RunFolder
from kvsearch.results.measurement import Measurement

PART = "search"
GIVEN_UP = f"killed {ATTEMPTS} times while it was evaluated"


def measure(
    executor: Executor,
    folder: RunFolder,
    part: str,
    policies: Sequence[Policy],
    setting: Setting,
    *,
    resident: bool = True,
    windows: int,
    first: int = 0,
    together: int = 1,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, str]:
    """Bring the NLL of every policy on a part into the folder; what is there is not done again.

    Several evaluators share the windows of a policy. One that kills its evaluator three times, or
    the driver with it, is left out from then on.

    Args:
        executor: where evaluations run; all of its slots are free.
        folder: where NLL and resident bytes go.
        part: name of the text part, also in the folder.
        policies: what to measure; equal ones once.
        setting: shape, and tokens of a window.
        resident: also count the bytes of the packed cache.
        windows: how many of the part's windows, from the first.
        first: how many of those have been measured before, of every policy.
        together: windows of a job, where there are several evaluators.
        progress: called with the name of every policy that is done.

    Returns:
        Why a policy could not be measured, by its fingerprint.

    Raises:
        RunError: no evaluator could be opened, or the full cache could not be measured; nothing
            can be compared then.
    """
    full = Policy().fingerprint(setting.shape.layers)
    keyed = {p.fingerprint(setting.shape.layers): p for p in policies}
    width = windows - first if executor.slots == 1 else together
    todo = [
        Evaluation(
            number=i, part=part, policy=policy, fingerprint=key, first=start,
            windows=min(width, windows - start), piece=first > 0 or width < windows,
            resident=resident and start == 0,
            # without the full cache there is no run: it is tried again after every kill
            counted=key != full,
        )
        for i, (key, policy) in enumerate(keyed.items())
        for start in range(first, windows, width)
    ]  # fmt: skip
    source = _Listed(folder, todo, windows, progress)
    Loop(executor, folder.attempts, source).drive()
    for start, key in folder.pieces(part):  # a kill can come when the record is whole
        if start < windows and key in keyed and key not in source.failures:
            folder.drop_nll(f"{part}.{start}", key)
    if full in source.failures:
        raise RunError(f"the full cache cannot be evaluated: {source.failures[full]}")
    return source.failures


class _Listed:
    """A list of evaluations."""

    def __init__(
        self,
        folder: RunFolder,
        todo: list[Evaluation],
        windows: int,
        progress: Callable[[str], None],
    ) -> None:
        self.folder, self.todo, self.windows, self.progress = folder, todo, windows, progress
        self.failures: dict[str, str] = {}
        self.pieces: dict[str, list[str]] = {}  # fingerprint -> names of records, in order
        for e in todo:
            self.pieces.setdefault(e.fingerprint, []).append(e.kept)

    def next(self) -> Evaluation | None:
        """The next one that is neither measured nor given up."""
        attempts = self.folder.attempts
        while self.todo:
            e = self.todo.pop(0)
            if self._before(e) >= self.windows:
                attempts.end(e.kept, e.fingerprint)  # a kill can come between the two
                self._done(e)
            elif e.fingerprint in self.failures:
                continue
            elif e.piece and self.folder.has_nll(e.kept, e.fingerprint):
                attempts.end(e.kept, e.fingerprint)
                self._join(e)
            elif e.counted and attempts.of(e.kept, e.fingerprint) >= ATTEMPTS:
                self.failed(e, GIVEN_UP)
            else:
                return e
        return None

    def begun(self, evaluation: Evaluation) -> None:
        """Nothing is written before it ends."""

    def measured(self, evaluation: Evaluation, found: Measurement) -> None:
        """Keep it."""
        e = evaluation
        self.folder.save_nll(e.kept, e.fingerprint, found, e.policy.name)
        if e.piece:
            self._join(e)
        else:
            self._done(e)

    def failed(self, evaluation: Evaluation, error: str) -> None:
        """Leave it out, and remember why."""
        if evaluation.fingerprint not in self.failures:
            self.failures[evaluation.fingerprint] = error
            self._done(evaluation)

    def _join(self, e: Evaluation) -> None:
        """Make one record of all pieces of a policy, if they are there."""
        names, key = self.pieces.get(e.fingerprint), e.fingerprint
        if names is None or not all(self.folder.has_nll(name, key) for name in names):
            return
        whole = [e.part] if self._before(e) else []
        found = Measurement.joined([self.folder.load_nll(name, key) for name in [*whole, *names]])
        self.folder.save_nll(e.part, key, found, e.policy.name)
        for name in names:
            self.folder.drop_nll(name, key)
        self._done(e)

    def _before(self, e: Evaluation) -> int:
        """How many windows of the policy its record holds already."""
        if not self.folder.has_nll(e.part, e.fingerprint):
            return 0
        return len(self.folder.load_nll(e.part, e.fingerprint).nll)

    def _done(self, e: Evaluation) -> None:
        if self.pieces.pop(e.fingerprint, None) is not None:
            self.progress(e.policy.name or e.fingerprint)
