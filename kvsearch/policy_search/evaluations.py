"""What a search evaluates: a policy on some windows of the search text."""

from dataclasses import dataclass

from kvsearch.policy_search.loop import Evaluation
from kvsearch.records import Trial


@dataclass(kw_only=True)
class TrialEvaluation(Evaluation):
    """The evaluation of a trial on its first windows."""

    trial: Trial


@dataclass(kw_only=True)
class WiderEvaluation(TrialEvaluation):
    """A trial on further windows.

    Attributes:
        due: whether the trial needs them now; else they are prefetched by an idle evaluator.
    """

    due: bool = True


@dataclass(kw_only=True)
class FullEvaluation(Evaluation):
    """The full cache on further windows: the reference of the policies that follow there."""
