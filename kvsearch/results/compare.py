"""Policies on the same windows or prompts: who is ahead, by how much, and how surely.

Whatever compares policies asks here: rows and headline of a report, its examples, facts and sizes,
what the terminal shows, and which rows get further windows. So all of them name the same opponent.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import hypot

from kvsearch.results.intervals import (
    Blocks,
    Spread,
    common,
    corrected,
    interval,
    long_blocks,
    mcnemar,
    paired,
    spread_of,
    standard_error,
    through,
    wilson_by_group,
)
from kvsearch.results.measurement import Answered, kept
from kvsearch.results.pareto import front
from kvsearch.results.records import Discordant, Interval, Kept, Kind


@dataclass(frozen=True, eq=False)
class Entry:
    """A policy among those that are compared.

    Attributes:
        kind: where the policy came from.
        bytes_peak: per sequence.
        losses: at scored tokens, or of contexts; some policies have the first windows only.
        answers: of prompts, of every context.
        stopped: whether it was certainly behind the recommended policy, and got no further windows.
    """

    kind: Kind
    bytes_peak: int
    losses: Blocks
    answers: tuple[Answered, ...] = ()
    stopped: bool = False


class Comparison:
    """Policies on one part of a text or of prompts.

    Policies are placed by their difference to the recommended one on the windows that both have:
    none is ahead because its windows are easier.

    Args:
        entries: by name, `full` among them.
        recommended: name of the policy through which all are compared; None: the full cache.
        budget: bytes per sequence.

    Attributes:
        level: of an interval, so that those of all entries hold at once.
    """

    def __init__(self, entries: Mapping[str, Entry], recommended: str | None, budget: int) -> None:
        self.entries, self.recommended, self.budget = dict(entries), recommended, budget
        self.level = corrected(len(self.entries) - 1)
        self._middle = self.entries[recommended or "full"].losses

    # -- losses --------------------------------------------------------------------------------

    @cached_property
    def loss(self) -> dict[str, float]:
        """Mean loss of each policy on all windows of the recommended one."""
        return {
            n: sum(x.mean() for x in through(e.losses, self._middle))
            for n, e in self.entries.items()
        }

    @cached_property
    def spread(self) -> Spread | None:
        """What all differences say of the variance of one."""
        if "full" not in self.entries:
            return None
        losses = [e.losses for e in self.entries.values()]
        return spread_of(losses, self._middle, self.entries["full"].losses)

    def error(self, name: str) -> tuple[float, int]:
        """Standard error of `loss`, and how many independent blocks or documents it rests on."""
        parts = through(self.entries[name].losses, self._middle)
        return hypot(*(standard_error(x) for x in parts)), min(long_blocks(x).count for x in parts)

    def over_full(self, name: str) -> Interval:
        """Loss over the full cache, on all windows of the recommended policy."""
        if name == "full":
            return Interval(0.0, 0.0, 0.0)
        parts = through(self.entries[name].losses, self._middle, self.entries["full"].losses)
        return interval(*parts, level=self.level, spread=self.spread)

    def difference(self, a: str, b: str, level: float = 0.95) -> Interval:
        """Loss of one policy over that of another, on the windows that both have."""
        mine, its = common(self.entries[a].losses, self.entries[b].losses)
        return paired(mine, its, level=level, spread=self.spread)

    def tokens(self, *names: str) -> int:
        """Scored tokens, or contexts, that all of the named policies were measured on."""
        return min(self.entries[n].losses.size for n in names)

    # -- the best ------------------------------------------------------------------------------

    @cached_property
    def front(self) -> frozenset[str]:
        """Policies that no other equals in both loss and bytes."""
        names = list(self.entries)
        points = [(float(self.entries[n].bytes_peak), self.loss[n]) for n in names]
        return frozenset(names[i] for i in front(points))

    def ranked(self, kind: Kind, than: str | None = None) -> list[str]:
        """Policies of a kind, least loss first.

        They take at most the budget, or the bytes of the policy that they are compared with, if
        more. What was stopped is left out: it is certainly behind, and little is known of it.

        Args:
            kind: of the policies.
            than: name of the policy that they are compared with; None: the recommended one.
        """
        than = than or self.recommended
        room = max(self.budget, self.entries[than].bytes_peak if than else 0)
        found = [
            n
            for n, e in self.entries.items()
            if e.kind == kind and n != than and not e.stopped and e.bytes_peak <= room
        ]
        return sorted(found, key=lambda n: self.loss[n])

    def best(self, kind: Kind, than: str | None = None) -> str | None:
        """The first of `ranked`."""
        return next(iter(self.ranked(kind, than)), None)

    def leads(self) -> list[str]:
        """The full cache, the recommended policy and the best published method.

        None of them where no policy is recommended.
        """
        named = dict.fromkeys(["full", self.recommended, self.best("method")])
        return [n for n in named if n is not None and self.recommended is not None]

    # -- answers of prompts --------------------------------------------------------------------

    def exact(self, name: str) -> Interval | None:
        """Share of answers that greedy decoding gives; None on a text."""
        asks = [(x, a.group) for a in self.entries[name].answers for x in a.exact]
        return wilson_by_group(*zip(*asks, strict=True)) if asks else None

    def kept(self, name: str) -> tuple[Kept, ...]:
        """What a policy keeps of each workload.

        An item's loss is a share of its context times the weight of its workload, and the mean over
        all items is the weighted one over workloads.
        """
        mine, full = self.entries[name], self.entries["full"]
        gap = mine.losses.less(full.losses.first(len(mine.losses.sums))) if mine.answers else None
        found = []
        for workload in dict.fromkeys(a.of for a in mine.answers):
            assert gap is not None
            at = [i for i, a in enumerate(mine.answers) if a.of == workload]
            its, whole = ([x.answers[i] for i in at] for x in (mine, full))
            groups = tuple(a.group for a in its)
            sums = gap.sums[at] / its[0].weight
            lost = interval(replace(gap, sums=sums, groups=groups, strata=()))
            found.append(kept(workload, lost, its, whole))
        return tuple(found)

    def discordant(self, name: str) -> Discordant | None:
        """Exact answers of a policy against the recommended one's, on contexts that both have."""
        best = None if self.recommended is None else self.entries[self.recommended].answers
        if not best or name == self.recommended:
            return None
        row, its, gaps = 0, 0, dict[str, int]()
        for a, b in zip(self.entries[name].answers, best, strict=False):
            alone = sum(x and not y for x, y in zip(a.exact, b.exact, strict=True))
            other = sum(y and not x for x, y in zip(a.exact, b.exact, strict=True))
            row, its = row + alone, its + other
            gaps[a.group] = gaps.get(a.group, 0) + alone - other
        return Discordant(row, its, mcnemar(list(gaps.values())))
