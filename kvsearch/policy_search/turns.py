"""What a search evaluates, and when a free proposal is better made later."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvsearch.policy_search.loop import Evaluation
from kvsearch.records import Kind, Trial

AT_ONCE = 0.5  # share of the free proposals that are left which is evaluated at once, at most


@dataclass(kw_only=True)
class TrialEvaluation(Evaluation):
    """The evaluation of a trial on the search text."""

    trial: Trial


@dataclass(kw_only=True)
class WiderEvaluation(TrialEvaluation):
    """A trial on further windows.

    Attributes:
        due: whether it is the turn of the trial; else its evaluator had nothing to do.
    """

    due: bool = True


@dataclass(kw_only=True)
class FullEvaluation(Evaluation):
    """The full cache on further windows: the reference of the policies that follow there."""


def at_once(left: int) -> int:
    """Free proposals that are evaluated at once at most, if so many are not yet evaluated."""
    return max(1, int(AT_ONCE * left))


def waits(under_way: Sequence[Kind], unmade: int) -> bool:
    """Whether a free proposal, though wanted, waits for what others will have found.

    With many evaluators most proposals would otherwise be made at once, knowing nothing.

    Args:
        under_way: kinds of the trials that are evaluated now; methods are waited for.
        unmade: free proposals that are still to be made.
    """
    proposals = under_way.count("searched")
    return proposals < len(under_way) or proposals >= at_once(unmade + proposals)


def kept_free(under_way: Sequence[Kind], unmade: int, slots: int) -> int:
    """Evaluators for the proposals that come all at once when the methods have ended.

    A window that was begun just before would delay a proposal by its whole length, and all that
    follows from it. Where there are more such proposals than evaluators, all are at work anyway.

    Args:
        under_way, unmade: as for `waits`.
        slots: evaluators.
    """
    due = at_once(unmade) if set(under_way) - {"searched"} else 0
    return due if due < slots else 0
