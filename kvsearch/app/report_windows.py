"""How many windows of the report text each row gets: more where they decide."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvsearch.knobs import Setting
from kvsearch.policy_search.folder import RunFolder
from kvsearch.policy_search.run_files import MeasuredRow
from kvsearch.records import Interval, Trial
from kvsearch.stats import (
    BLOCK,
    Blocks,
    blocks,
    common,
    corrected,
    paired,
    spread_of,
    standard_error,
)
from kvsearch.student import quantile

Nll = NDArray[np.float32]

FALSE = 0.05  # chance that any of the rows called behind is not
COMPARED = {"method": 3, "combined": 4}  # of the best on the search text, which have a row
PARTS = 16  # blocks of a window, of at least `BLOCK` tokens, that a row is called behind by


def behind(nll: Nll, rival: Nll, *, score_from: int, false: float) -> Interval | None:
    """How far a policy is behind another on the windows that it has, if it certainly is.

    The quantile is Student's over the blocks of the windows seen; that so many blocks are not too
    many was tried on records recentred to equal loss (`studies/2026-11-coverage`).

    Args:
        nll: of the policy on the first windows `[windows, T - 1]`.
        rival: of the other, on as many windows or more.
        score_from: first scored position.
        false: how often a policy that is as good may be called behind.

    Returns:
        The mean difference in nats per token, with the limits by which it was judged.
    """
    less = (nll - rival[: len(nll)])[:, score_from - 1 :]
    block = max(BLOCK, -(-less.shape[1] // PARTS))
    half = quantile(1 - false, blocks(less, block).count - 1) * standard_error(less, block)
    mean = float(less.mean())
    return Interval(mean, mean - half, mean + half) if mean > half else None


def looks(first: int, last: int) -> tuple[int, ...]:
    """Windows at which rows are compared: the first ones, twice as many, and so on to the last."""
    found = [first]
    while found[-1] < last:
        found.append(min(2 * found[-1], last))
    return tuple(found)


@dataclass(frozen=True)
class ReportWindows:
    """Measures rows on one window of the report text, on two, on four; few of them on more.

    Attributes:
        folder: where losses go.
        measure: brings losses of policies on a part into the folder, see `FinalEvaluation`.
        setting: shape, budget and length of a window.
        score_from: first scored position.
        each: windows for every row that is not certainly behind.
        headline: windows for the comparisons at the head of the report, where `each` leave them
            undecided.
        together: windows of a job, where there are several evaluators.
        every: give a row to every method, and not only to the best few on the search text.
    """

    folder: RunFolder
    measure: Callable[..., dict[str, str]]
    setting: Setting
    score_from: int
    each: int
    headline: int
    together: int = 1
    every: bool = False

    def rows(
        self, chosen: list[Trial], recommended: str | None
    ) -> tuple[list[MeasuredRow], dict[str, Interval], dict[str, str]]:
        """Measure the rows on one window, on two; who is certainly behind, no further.

        Windows go where they decide: what is stopped is a method that the recommended policy beats
        on the windows of search and report text that both have. That the policy was chosen on the
        search text favours it there, by far less than a certain difference. The best published
        method and the best combination so far always go on: the headline compares with them, on
        report text alone.

        Returns:
            The rows; how far methods without a row were behind on the search text; and why others
            could not be measured.
        """
        failures: dict[str, str] = {}
        stops = looks(min(self.together, self.each), self.each)
        false, done = FALSE / (len(chosen) * len(stops)), 0
        best = next((c for c in chosen if c.name == recommended), None)
        absent = {} if best is None or self.every else self._absent(chosen, best)
        chosen = [c for c in chosen if c.name not in absent]
        stopped: dict[str, Interval] = {}
        for windows in stops:
            left = [
                c for c in chosen if c.fingerprint not in failures and c.fingerprint not in stopped
            ]
            title = "report text" if windows == stops[0] else f"report text, {windows} windows"
            policies = [c.policy for c in left]
            failures |= self.measure("report", title, policies, windows=windows, first=done)
            done = windows
            left = [c for c in left if c.fingerprint not in failures]
            best = next((c for c in left if c.name == recommended), None)
            if best is None:
                continue
            if windows < stops[-1]:
                stopped |= self._stopped(left, best, windows, false)
                continue
            kept = [c for c in chosen if c.fingerprint not in failures]
            self._headline(kept, chosen[0], best)
        measured = [c for c in chosen if c.fingerprint not in failures]
        rows = [
            MeasuredRow.of(
                c, self.folder.load_nll("report", c.fingerprint), stopped.get(c.fingerprint)
            )
            for c in measured
        ]
        why = {c.name: failures[c.fingerprint] for c in chosen if c.fingerprint in failures}
        return rows, absent, why

    def _absent(self, chosen: list[Trial], best: Trial) -> dict[str, Interval]:
        """Methods and combinations that were not among the best few on the search text."""
        found: dict[str, Interval] = {}
        for kind, count in COMPARED.items():
            mine = {c.name: c.fingerprint for c in chosen if c.kind == kind and c != best}
            gaps = {name: self._searched(key, best.fingerprint) for name, key in mine.items()}
            found |= dict(sorted(gaps.items(), key=lambda kv: kv[1].mean)[count:])
        return found

    def _searched(self, key: str, other: str) -> Interval:
        """Loss over another policy on the windows of the search text that both have."""
        a, b = (self.folder.losses("search", k, self.score_from - 1) for k in (key, other))
        return paired(*common(a, b))

    def _stopped(
        self, left: list[Trial], best: Trial, windows: int, false: float
    ) -> dict[str, Interval]:
        """Baselines that are certainly behind on so many report windows and the search text."""
        found: dict[str, Interval] = {}
        for c in left:
            if c.kind in ("full", "searched") or c in (best, *self._leads(left, best, windows)):
                continue
            mine, its = self._both(c.fingerprint, best.fingerprint, windows)
            gap = behind(mine, its, score_from=self.score_from, false=false)
            found |= {} if gap is None else {c.fingerprint: gap}
        return found

    def _leads(self, left: list[Trial], best: Trial, windows: int | None = None) -> list[Trial]:
        """The opponents of the headline so far: the best published method and combination."""
        found = []
        for kind in ("method", "combined"):
            rivals = [c for c in left if c.kind == kind and c != best]
            found += sorted(rivals, key=lambda c: self.reported(c, best, windows))[:1]
        return found

    def _headline(self, rows: list[Trial], full: Trial, best: Trial) -> None:
        """Further windows where the headline is undecided on those that every row has.

        Every look is at the level at which all of them hold together, and at all opponents: further
        windows of one may leave another undecided, since they share what is known of variance, or
        make another the best of its kind.
        """
        at = looks(self.each, self.headline)
        level = corrected(len(at))
        for _, more in pairwise(at):
            undecided, kept = [], {c.fingerprint: self._blocks(c.fingerprint) for c in rows}
            spread = spread_of(kept.values(), kept[best.fingerprint], kept[full.fingerprint])
            for c in self._leads(rows, best):
                mine, its = common(kept[best.fingerprint], kept[c.fingerprint])
                gap = paired(mine, its, level=level, spread=spread)
                if gap.lo <= 0 <= gap.hi:
                    undecided.append(c)
            if not undecided:
                return
            failures = self._go_on([full, best, *undecided], more)
            rows = [c for c in rows if c.fingerprint not in failures]
            if best.fingerprint in failures:
                return

    def _go_on(self, rows: list[Trial], windows: int) -> dict[str, str]:
        """Measure rows up to so many windows, each from where it stands; failures by key."""
        failures: dict[str, str] = {}
        done = {c.fingerprint: len(self._losses("report", c.fingerprint)) for c in rows}
        for first in sorted({*done.values()}):
            policies = [c.policy for c in rows if done[c.fingerprint] == first < windows]
            if policies:
                title = f"report text, {windows} windows"
                failures |= self.measure("report", title, policies, windows=windows, first=first)
        return failures

    def _losses(self, part: str, key: str, windows: int | None = None) -> Nll:
        """NLL of a policy on a part, or on its first windows: a resumed run may have more."""
        return self.folder.load_nll(part, key).nll[:windows]

    def _blocks(self, key: str) -> Blocks:
        """Scored losses of a policy on the report text, as the report compares them."""
        return self.folder.losses("report", key, self.score_from - 1)

    def reported(self, c: Trial, over: Trial, windows: int | None = None) -> float:
        """Loss over another policy on the report text, on the first windows or all that both have.

        Of policies with different numbers of windows the order is that of the report only if
        `over` is the recommended one.
        """
        nll, its = (self._losses("report", k, windows) for k in (c.fingerprint, over.fingerprint))
        both = min(len(nll), len(its))
        return float((nll[:both] - its[:both])[:, self.score_from - 1 :].mean())

    def _both(self, key: str, other: str, windows: int) -> tuple[Nll, Nll]:
        """NLL of two policies on the search text, and on the first windows of the report text."""
        mine, its = [], []
        for part in ("search", "report"):
            if self.folder.has_nll(part, key) and self.folder.has_nll(part, other):
                most = windows if part == "report" else None
                a, b = (self._losses(part, k, most) for k in (key, other))
                both = min(len(a), len(b))
                mine.append(a[:both])
                its.append(b[:both])
        return np.concatenate(mine), np.concatenate(its)
