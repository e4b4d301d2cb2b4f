"""Multi-fidelity evaluation: which policy is measured on one more window.

Every policy starts with the first window, or with several short ones, and all see them in the same
order, so of two policies one has measured what the other has, and perhaps more. More windows go to
the policies that may be chosen: a search that measures everything on few windows learns those
windows.

Which policies those are is judged by the mean over the windows of each. Some windows are harder
than others, for all policies in proportion; but to bring policies to a common level by what others
lost on the further windows is worse: those were chosen for their luck on the first ones
(`studies/2026-11-search-efficiency`).
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, repeat

from kvsearch.results.pareto import nondominated
from kvsearch.results.records import Trial

BEST = 4  # policies within the budget that get more windows, beside the front


def ranks(trials: Sequence[Trial], limit: int | None) -> Iterator[list[Trial]]:
    """Non-dominated sorting, as in NSGA-II: contenders, then those that would be without them.

    Args:
        trials: all of a run.
        limit: bytes per sequence of the budget, or None.

    Yields:
        The best few within the budget, and the front; least loss first.
    """
    most = 1 << 62 if limit is None else limit
    done = [t for t in trials if t.state == "complete" and (t.bytes_peak or 0) <= most]
    done.sort(key=lambda t: t.dnll or 0.0)
    points = [(float(t.bytes_peak or 0), t.dnll or 0.0, -(t.speed or 0.0)) for t in done]
    while done:
        best = {*nondominated(points), *range(min(BEST, len(done)))}
        yield [done[i] for i in sorted(best)]
        rest = [i for i in range(len(done)) if i not in best]
        done, points = [done[i] for i in rest], [points[i] for i in rest]


def contenders(trials: Sequence[Trial], limit: int | None) -> list[Trial]:
    """The first of `ranks`: who may be chosen or be on the front."""
    return next(ranks(trials, limit), [])


def least_measured(
    trials: Sequence[Trial], limit: int | None, most: int, windows: Mapping[int, int]
) -> Trial | None:
    """The contender with the fewest windows, if it can have more; of equals the better one.

    Args:
        trials: all of a run.
        limit: bytes per sequence of the budget, or None.
        most: windows that a policy may have.
        windows: of every trial by its number, those included that are being measured.
    """
    found = [t for t in contenders(trials, limit) if windows[t.number] < most]
    return min(found, key=lambda t: windows[t.number], default=None)


def likely(
    trials: Sequence[Trial],
    running: Sequence[Trial],
    limit: int | None,
    most: int,
    windows: Mapping[int, int],
    depth: int,
) -> Trial | None:
    """The policy whose next window is most likely to be needed, for an evaluator without a job.

    Contenders come first. The policies that would be contenders without them are the second rank,
    and so on: they may become contenders when others lose by further windows. A rank is worth a
    window, so that a policy has the more windows the better it is. Nothing is known about a policy
    that is measured for the first time; it counts as one of the second rank.

    Args:
        trials: all of a run.
        running: those that are measured for the first time.
        limit: bytes per sequence of the budget, or None.
        most: windows that a policy may have.
        windows: of every trial by its number, those included that are being measured.
        depth: ranks that are looked at.
    """
    found, least = None, most + depth
    ranked = chain(ranks(trials, limit), repeat([]))
    for rank, best in zip(range(depth), ranked, strict=False):
        if rank >= least:  # a later rank cannot have less
            break
        for t in [*best, *(running if rank == 1 else ())]:
            if windows[t.number] < most and windows[t.number] + rank < least:
                found, least = t, windows[t.number] + rank
    return found


def comparable(trials: Sequence[Trial], limit: int) -> list[Trial]:
    """Policies within the budget of `limit` bytes on the most windows, from which one is chosen."""
    done = [t for t in trials if t.state == "complete" and t.nll is not None]
    return most_measured([t for t in done if (t.bytes_peak or 0) <= limit])


def most_measured(trials: Sequence[Trial]) -> list[Trial]:
    """Those with the most windows; only they are compared with each other and chosen."""
    most = max((t.windows for t in trials), default=0)
    return [t for t in trials if t.windows == most]
