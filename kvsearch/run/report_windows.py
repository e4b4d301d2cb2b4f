"""How many windows of the report text each row gets: more where they decide."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvsearch.policy_space import Setting
from kvsearch.results.compare import Comparison, Entry
from kvsearch.results.folder import RunFolder
from kvsearch.results.intervals import BLOCK, Spread, blocks, corrected, spread, standard_error
from kvsearch.results.records import Interval, Kind, MeasuredPolicy, Trial
from kvsearch.results.run_files import measured_row
from kvsearch.results.student_t import quantile

Nll = NDArray[np.float32]

FALSE = 0.05  # chance that any of the rows called behind is not
# Of the best on the search text, which have a row; starting points on its front do, too.
COMPARED: dict[Kind, int] = {"method": 3, "combined": 3, "earlier": 3}
PARTS = 16  # blocks of a window, of at least `BLOCK` tokens, that a row is called behind by


def behind(
    nll: Nll,
    rival: Nll,
    groups: Sequence[str] = (),
    strata: Sequence[str] = (),
    *,
    score_from: int,
    false: float,
    spread: Spread | None = None,
) -> Interval | None:
    """How far a policy is behind another on the windows that it has, if it certainly is.

    The quantile is Student's over the blocks of the windows seen; that so many blocks are not too
    many was tried on records recentred to equal loss (`studies/2026-11-coverage`).

    Args:
        nll: of the policy on the first windows `[windows, T - 1]`.
        rival: of the other, on as many windows or more.
        groups, strata: of prompts, the document and the workload of each window of the policy.
        score_from: first scored position.
        false: how often a policy that is as good may be called behind.
        spread: of documents, what the differences of all policies say of the variance of one.

    Returns:
        The mean difference in nats per token, with the limits by which it was judged.
    """
    less = (nll - rival[: len(nll)])[:, score_from - 1 :]
    found = blocks(less, max(BLOCK, -(-less.shape[1] // PARTS)), groups, strata)
    if found.count < 2:  # a window, or a document of some workload, says nothing of variance
        return None
    error, df = standard_error(found, int(found.tokens[0])), found.count - 1
    if spread is not None and error > 0:
        error, df = spread.moderated(float(less.mean()), error, found.count, found.size)
    half = quantile(1 - false, df) * error
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
        self, chosen: list[Trial], recommended: str | None, front: Collection[str] = ()
    ) -> tuple[list[MeasuredPolicy], dict[str, Interval], dict[str, str]]:
        """Measure the rows on one window, on two; who is certainly behind, no further.

        Windows go where they decide: what is stopped is a method that the recommended policy beats
        on the windows of search and report text that both have. That the policy was chosen on the
        search text favours it there, by far less than a certain difference. The best published
        method and the best combination so far always go on: the headline compares with them, on
        report text alone.

        Args:
            chosen: the full cache first, then whatever may have a row.
            recommended: name of the policy that they are compared with.
            front: of the search; starting points that are on it have a row in any case.

        Returns:
            The rows; how far policies without a row were behind on the search text; and why others
            could not be measured.
        """
        failures: dict[str, str] = {}
        stops = looks(min(self.together, self.each), self.each)
        false, done = FALSE / (len(chosen) * len(stops)), 0
        best = next((c for c in chosen if c.name == recommended), None)
        absent = {} if best is None or self.every else self._absent(chosen, best, front)
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
            self._headline(kept, chosen[0], best, stopped)
        measured = [c for c in chosen if c.fingerprint not in failures]
        rows = [
            measured_row(
                c, self.folder.load_nll("report", c.fingerprint), stopped.get(c.fingerprint)
            )
            for c in measured
        ]
        why = {c.name: failures[c.fingerprint] for c in chosen if c.fingerprint in failures}
        return rows, absent, why

    def compared(
        self,
        rows: Sequence[Trial],
        recommended: str | None,
        stopped: Collection[str] = (),
        windows: int | None = None,
        part: str = "report",
    ) -> Comparison:
        """Policies on the windows of a part that they have, or on the first of these.

        Args:
            rows: the policies; each was measured there.
            recommended: name of the policy through which they are compared.
            stopped: fingerprints of those that are certainly behind.
            windows: the first of so many; None: all.
            part: of the text.
        """
        entries = {
            c.name: Entry(
                c.kind,
                c.bytes_peak or 0,
                self.folder.losses(part, c.fingerprint, self.score_from - 1).first(windows),
                stopped=c.fingerprint in stopped,
            )
            for c in rows
        }
        return Comparison(entries, recommended, self.setting.budget_bytes or 0)

    def _absent(
        self, chosen: list[Trial], best: Trial, front: Collection[str]
    ) -> dict[str, Interval]:
        """Methods, combinations and starting points not among the best few on the search text."""
        rivals = [c for c in chosen if c.kind in COMPARED and c != best]
        of = self.compared([best, *rivals], best.name, part="search")
        last = [n for kind, count in COMPARED.items() for n in of.ranked(kind)[count:]]
        mine = {c.name for c in rivals if c.kind == "earlier" and c.name in front}
        return {name: of.difference(name, best.name) for name in last if name not in mine}

    def _stopped(
        self, left: list[Trial], best: Trial, windows: int, false: float
    ) -> dict[str, Interval]:
        """Baselines that are certainly behind on so many report windows and the search text."""
        found: dict[str, Interval] = {}
        leads = _opponents(self.compared(left, best.name, windows=windows))
        both = {
            c.fingerprint: self._both(c.fingerprint, best.fingerprint, windows)
            for c in left
            if c.kind not in ("full", "searched") and c != best and c.name not in leads
        }
        by_document = [
            (blocks(a - b, groups=groups, strata=strata),)
            for a, b, groups, strata in both.values()
            if groups
        ]
        known = spread(by_document)
        for key, pair in both.items():
            gap = behind(*pair, score_from=self.score_from, false=false, spread=known)
            found |= {} if gap is None else {key: gap}
        return found

    def _headline(
        self, rows: list[Trial], full: Trial, best: Trial, stopped: Collection[str]
    ) -> None:
        """Further windows where the headline is undecided on those that every row has.

        Every look is at the level at which all of them hold together, and at all opponents: further
        windows of one may leave another undecided, since they share what is known of variance, or
        make another the best of its kind.
        """
        at = looks(self.each, self.headline)
        level = corrected(len(at))
        for _, more in pairwise(at):
            of = self.compared(rows, best.name, stopped)
            gaps = {n: of.difference(best.name, n, level) for n in _opponents(of)}
            undecided = [c for c in rows if c.name in gaps and gaps[c.name].undecided]
            if not undecided:
                return
            failures = self._go_on([full, best, *undecided], more)
            rows = [c for c in rows if c.fingerprint not in failures]
            if best.fingerprint in failures:
                return

    def _go_on(self, rows: list[Trial], windows: int) -> dict[str, str]:
        """Measure rows up to so many windows, each from where it stands; failures by key."""
        failures: dict[str, str] = {}
        done = {c.fingerprint: len(self.folder.load_nll("report", c.fingerprint).nll) for c in rows}
        for first in sorted({*done.values()}):
            policies = [c.policy for c in rows if done[c.fingerprint] == first < windows]
            if policies:
                title = f"report text, {windows} windows"
                failures |= self.measure("report", title, policies, windows=windows, first=first)
        return failures

    def _both(
        self, key: str, other: str, windows: int
    ) -> tuple[Nll, Nll, tuple[str, ...], tuple[str, ...]]:
        """NLL of two policies on the search text, and on the first windows of the report text.

        A resumed run may have more of these. Of prompts, the document and the workload of each are
        there, too.
        """
        mine, its, groups, strata = [], [], list[str](), list[str]()
        for part in ("search", "report"):
            if self.folder.has_nll(part, key) and self.folder.has_nll(part, other):
                a, b = (self.folder.load_nll(part, k) for k in (key, other))
                both = min(len(a.nll), len(b.nll), *([windows] if part == "report" else []))
                mine.append(a.nll[:both])
                its.append(b.nll[:both])
                groups += [f"{part}: {group}" for group in a.groups[:both]]  # each has its own
                strata += a.strata[:both]
        return np.concatenate(mine), np.concatenate(its), tuple(groups), tuple(strata)


def _opponents(of: Comparison) -> list[str]:
    """Whom the headline compares with: the best published method and combination so far."""
    kinds: tuple[Kind, ...] = ("method", "combined")
    return [n for n in map(of.best, kinds) if n is not None]
