"""Growing windows: which policy is measured on one more window.

Every policy starts with the first window, and all see the windows in the same order, so of two
policies one has measured what the other has, and perhaps more. More windows go to the policies that
may be chosen: a search that measures everything on few windows learns those windows.

Which policies those are is judged by the mean over the windows of each. Some windows are harder
than others, for all policies in proportion; but to bring policies to a common level by what others
lost on the further windows is worse: those were chosen for their luck on the first ones
(`studies/2026-11-search-efficiency`).
"""

from collections.abc import Collection, Sequence

from kvsearch.pareto import nondominated
from kvsearch.records import Trial

BEST = 4  # policies within the budget that get more windows, beside the front


def contenders(trials: Sequence[Trial], limit: int | None) -> list[Trial]:
    """The best few within the budget, and the front; least loss first.

    Args:
        trials: all of a run.
        limit: bytes per sequence of the budget, or None.
    """
    most = 1 << 62 if limit is None else limit
    done = [t for t in trials if t.state == "complete" and (t.bytes_peak or 0) <= most]
    done.sort(key=lambda t: t.dnll or 0.0)
    points = [(float(t.bytes_peak or 0), t.dnll or 0.0, -(t.speed or 0.0)) for t in done]
    return [done[i] for i in sorted({*nondominated(points), *range(min(BEST, len(done)))})]


def least_measured(
    trials: Sequence[Trial], limit: int | None, most: int, busy: Collection[int]
) -> Trial | None:
    """The contender with the fewest windows, if it can have more; of equals the better one.

    Args:
        trials: all of a run.
        limit: bytes per sequence of the budget, or None.
        most: windows that a policy may have.
        busy: numbers of trials that are being measured.
    """
    found = [t for t in contenders(trials, limit) if t.windows < most and t.number not in busy]
    return min(found, key=lambda t: t.windows, default=None)


def most_measured(trials: Sequence[Trial]) -> list[Trial]:
    """Those with the most windows; only they are compared with each other and chosen."""
    most = max((t.windows for t in trials), default=0)
    return [t for t in trials if t.windows == most]
