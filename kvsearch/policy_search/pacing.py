"""How many free proposals a search still makes, and how many of them are evaluated at once.

With many evaluators most proposals would otherwise be made at once, knowing nothing.
"""

from collections.abc import Sequence

from kvsearch.policy_search.trials import SearchState
from kvsearch.results.records import Kind

AT_ONCE = 0.5  # share of the free proposals that are left which is evaluated at once, at most
MISSES = 50  # proposals without an evaluation, per trial asked for, after which none is made


class Pacing:
    """How many free proposals a search still makes.

    Args:
        state: of the search.
    """

    def __init__(self, state: SearchState) -> None:
        self.state, self._ended = state, False

    def end(self) -> bool:
        """Whether nothing is to be gained by further ones, asked before each; then none is made."""
        enough = self.state.task.enough
        self._ended = enough is not None and enough(self.state.study.optuna_study)
        return self._ended

    def made(self) -> int:
        """How many are evaluated, or were."""
        done = ("complete", "failed")
        spent = sum(t.kind == "searched" and t.state in done for t in self.state.trials)
        return spent + sum(t.kind == "searched" for t in self.state.under_way())

    def wanted(self) -> bool:
        """Whether another one should be started, now or later."""
        trials = self.state.task.trials
        return (
            not self._ended and self.made() < trials and self.state.misses < MISSES * (trials + 1)
        )

    def waits(self) -> bool:
        """Whether one, though wanted, waits for what others will have found."""
        kinds = self._kinds()
        proposals = kinds.count("searched")
        return proposals < len(kinds) or proposals >= _at_once(self._unmade() + proposals)

    def reserved(self, slots: int) -> int:
        """Evaluators for the proposals that come all at once when the methods have ended.

        A window that was begun just before would delay a proposal by its whole length, and all
        that follows from it. Where there are more such proposals than evaluators, all are at work
        anyway.

        Args:
            slots: evaluators.
        """
        due = _at_once(self._unmade()) if set(self._kinds()) - {"searched"} else 0
        return due if due < slots else 0

    def _kinds(self) -> Sequence[Kind]:
        return [t.kind for t in self.state.under_way()]

    def _unmade(self) -> int:
        return self.state.task.trials - self.made()


def _at_once(left: int) -> int:
    """Free proposals that are evaluated at once at most, if so many are not yet evaluated."""
    return max(1, int(AT_ONCE * left))
