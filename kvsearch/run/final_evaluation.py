"""Selection and final evaluation.

Finalists are measured on other text, the best of them is recommended, the rows of the report are
frozen, and everything is measured once on a third text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from kvsearch.errors import PolicyError
from kvsearch.files import write_atomic
from kvsearch.policy import Policy, check, layout
from kvsearch.policy_search.executors import Executor
from kvsearch.policy_search.fidelity import comparable
from kvsearch.policy_search.fixed_list import measure
from kvsearch.policy_space import Setting, build
from kvsearch.results.compare import Comparison
from kvsearch.results.folder import RunFolder
from kvsearch.results.measurement import Measurement
from kvsearch.results.pareto import nondominated
from kvsearch.results.records import Kind, Trial
from kvsearch.results.run_files import ExtraText, Frozen, Measured, Size, Sizes
from kvsearch.run.report_windows import ReportWindows
from kvsearch.session.progress import Shown

Nll = NDArray[np.float32]

FINALISTS = 4  # policies that are measured again on the select text
# of the best of each kind, for checks on further texts
OPPONENTS: dict[Kind, int] = {"method": 3, "combined": 3, "earlier": 1, "searched": 1}
FRONT = 6  # members of the search front that go to the report
SMALLER, LARGER = (0.25, 0.375, 0.5), (2.0, 3.0)  # other sizes, as shares of the budget
NEAR = 0.003  # of losses that nobody could tell apart; where workloads take turns, who is even
CHOICE = 0.25  # share of the search's tokens that the selection may cost; one pass at least


def select_windows(policies: int, windows: int) -> int:
    """Number of select windows: as many as the search has, or more in a long search.

    Finalists differ little: on SmolLM2-135M often by less than the standard error on two windows
    of 4096 tokens, some 0.004 nats (`studies/2026-11-layer-budgets`).

    Args:
        policies: that the search may evaluate.
        windows: that it measures a policy on, on average.
    """
    return max(windows, int(CHOICE * policies * windows / FINALISTS))


@dataclass
class FinalEvaluation:
    """Selects the recommended policy, freezes the rows, and measures them on the report text.

    Attributes:
        folder, executor: where results go and where they come from.
        setting: shape, budget and length of a window.
        score_from: first scored position.
        shown: progress.
        extra: part name -> (label, token hash) of further texts.
        windows: part name -> how many it has.
        select: name of the part for the selection.
        together: windows of a job, where there are several evaluators.
        each: windows of the report text for every row; what is beyond is for the headline, and
            there is nothing beyond with 0.
        every: give a row to every method, and not only to the best few on the search text.
    """

    folder: RunFolder
    executor: Executor
    setting: Setting
    score_from: int
    shown: Shown
    extra: Mapping[str, tuple[str, str]]
    windows: Mapping[str, int]
    select: str = "select1"
    together: int = 1
    each: int = 0
    every: bool = False

    def go(self, trials: list[Trial]) -> Measured:
        """All stages; returns what `measured.json` keeps, decode speed aside."""
        recommended = self._select(trials)
        front = self._front(trials)
        headline = self.windows["report"]
        report = ReportWindows(
            self.folder, self._measure, self.setting, self.score_from,
            self.each or headline, headline, self.together, self.every,
        )  # fmt: skip
        chosen = self._chosen(trials, {*front[:FRONT], recommended})
        frozen = Frozen(recommended, [c.name for c in chosen], front)
        write_atomic(self.folder.path / "frozen.json", frozen.text())
        rows, absent, dropped = report.rows(chosen, recommended, front[:FRONT])
        named = {r.name for r in rows}
        recommended = recommended if recommended in named else None
        chosen = [c for c in chosen if c.name in named]
        stopped = {r.fingerprint for r in rows if r.stopped is not None}
        of = report.compared(chosen, recommended, stopped)
        return Measured(
            rows=rows,
            recommended=recommended,
            sizes=self._sizes(trials, of),
            extra_text=self._extra_texts(chosen, of),
            behind=absent,
            dropped=dropped,
        )

    def _within(self, trials: list[Trial]) -> list[Trial]:
        return comparable(trials, self.setting.budget_bytes or 0)

    def _select(self, trials: list[Trial]) -> str | None:
        """Measure the best few within the budget on the select text; the best on both texts.

        That a policy is among the few is partly chance on the search text, but the same chance for
        all of them: losses there are as good evidence of their order as on as much other text. Of
        policies whose losses nobody could tell apart, it is the one that is nowhere far behind.
        """
        best = sorted(self._within(trials), key=lambda t: t.nll or 0.0)[:FINALISTS]
        policies = [t.policy for t in best]
        failures = self._measure(self.select, "selection on other text", policies, resident=False)
        parts = ("search", self.select)
        scores = {
            t.fingerprint: self._loss(parts, t.fingerprint)
            for t in best
            if t.fingerprint not in failures
        }
        near = [key for key, loss in scores.items() if loss <= min(scores.values()) + NEAR]
        chosen = min(self._furthest_behind(parts, near).items(), key=itemgetter(1), default=None)
        return next((t.name for t in best if chosen and t.fingerprint == chosen[0]), None)

    def _furthest_behind(self, parts: tuple[str, ...], keys: list[str]) -> dict[str, float]:
        """How far each policy is behind the best of these on the workload where it is furthest.

        Where there is one workload that is the loss over the best of them.
        """
        means: dict[str, dict[str, float]] = {}
        for key in keys:
            found = Measurement.joined([self.folder.load_nll(part, key) for part in parts])
            nll = found.nll[:, self.score_from - 1 :].mean(1, dtype=np.float64)
            of = np.array([a.of for a in found.answers] or [""] * len(nll))
            means[key] = {name: float(nll[of == name].mean()) for name in dict.fromkeys(of)}
        least = {w: min(m[w] for m in means.values()) for m in means.values() for w in m}
        return {key: max(m[w] - least[w] for w in m) for key, m in means.items()}

    def _front(self, trials: list[Trial]) -> list[str]:
        """Names on the front of the search within the budget, least loss first."""
        within = self._within(trials)
        points = [(float(t.bytes_peak or 0), t.nll or 0.0, -(t.speed or 0.0)) for t in within]
        order = sorted(nondominated(points), key=lambda i: within[i].nll or 0.0)
        return [within[i].name for i in order]

    def _chosen(self, trials: list[Trial], keep: set[str | None]) -> list[Trial]:
        """The full cache, all baselines, and the trials named in `keep`."""
        baselines = {
            t.name for t in trials if t.kind != "searched" and t.state in ("complete", "duplicate")
        }
        full = Trial.full(self.setting.shape.layers)
        return [full, *(t for t in trials if t.name in baselines | keep)]

    def _sizes(self, trials: list[Trial], of: Comparison) -> list[Sizes]:
        """The recommended policy and the best published method at other sizes, on first windows."""
        known = {t.name: t for t in trials}
        wanted: dict[str, tuple[float, ...]] = {}
        if of.recommended in known:
            wanted[of.recommended] = SMALLER + LARGER[:1]
        if (lead := of.best("method")) is not None:
            wanted.setdefault(lead, LARGER)
        made = {n: _resized(known[n], self.setting, shares) for n, shares in wanted.items()}
        policies = [p for some in made.values() for p in some]
        windows = min(self.together, self.each or self.windows["report"])  # as all rows have
        failures = self._measure("report", "other sizes", policies, windows=windows, resident=False)
        found = []
        for name, some in made.items():
            keys = [p.fingerprint(self.setting.shape.layers) for p in some]
            peaks = [
                layout(p, self.setting.shape).bytes_peak(self.setting.tokens, self.setting.prompt)
                for p in some
            ]
            sizes = [
                Size(fingerprint=k, bytes=b)
                for k, b in zip(keys, peaks, strict=True)
                if k not in failures
            ]
            found.append(Sizes(name=name, sizes=sizes))
        return found

    def _extra_texts(self, chosen: list[Trial], of: Comparison) -> dict[str, ExtraText]:
        """The recommended policy, the best searched one and their opponents on further texts."""
        out: dict[str, ExtraText] = {}
        names = {
            "full",
            of.recommended,
            *(n for k, c in OPPONENTS.items() for n in of.ranked(k)[:c]),
        }
        wanted = [c for c in chosen if c.name in names]
        for part, (label, digest) in self.extra.items():
            self._measure(part, f"extra text {label}", [c.policy for c in wanted], resident=False)
            there = [c.name for c in wanted if self.folder.has_nll(part, c.fingerprint)]
            out[part] = ExtraText(label, there, digest)
        return out

    def _measure(
        self, part: str, title: str, policies: list[Policy], resident: bool = True,
        windows: int | None = None, first: int = 0,
    ) -> dict[str, str]:  # fmt: skip
        """`measure` with progress, and a sentence for every policy that it leaves out."""
        with self.shown.step(title, len(policies)) as step:
            failures = measure(
                self.executor, self.folder, part, policies, self.setting,
                resident=resident, windows=windows or self.windows[part], first=first,
                together=self.together,
                progress=lambda name: step.advance(1, name),
            )  # fmt: skip
        names = {p.fingerprint(self.setting.shape.layers): p.name for p in policies}
        for key, why in failures.items():
            self.shown.say(f"{title}: {names[key] or key} is left out: {why}")
        return failures

    def _loss(self, parts: tuple[str, ...], key: str, windows: int | None = None) -> float:
        """Mean over the scored tokens of all `parts`, or of their first windows."""
        nll = np.concatenate([self.folder.load_nll(part, key).nll[:windows] for part in parts])
        return float(nll[:, self.score_from - 1 :].mean())


def _resized(trial: Trial, setting: Setting, shares: Sequence[float]) -> list[Policy]:
    """A trial's policy in other shares of the budget, where it can be built so.

    What would take as much as the full cache is left out.

    Args:
        trial: with the knobs that it was built from.
        setting: of the run.
        shares: of the budget in bytes.
    """
    found, shape = list[Policy](), setting.shape
    full = layout(Policy(), shape).bytes_peak(setting.tokens, setting.prompt)
    for share in shares:
        room = int(share * (setting.budget_bytes or 0))
        if not 0 < room < full:
            continue
        try:
            name = f"{trial.name} x {share:g}"
            policy = build(trial.params, replace(setting, budget_bytes=room), name=name)
            check(policy, shape, prompt=setting.prompt)
        except PolicyError:
            continue
        found.append(policy)
    return found
