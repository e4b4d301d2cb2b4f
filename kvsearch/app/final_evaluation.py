"""The final evaluation: the front is frozen, then everything is measured once on other text."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsearch.app.progress import Shown
from kvsearch.files import write_atomic
from kvsearch.knobs import Setting
from kvsearch.pareto import nondominated
from kvsearch.policy import Policy
from kvsearch.records import Interval, Kind, Trial, plain
from kvsearch.search.executors import Executor
from kvsearch.search.folder import RunFolder
from kvsearch.search.growing import most_measured
from kvsearch.search.measure import measure
from kvsearch.search.race import behind, rungs
from kvsearch.search.schema import SCHEMA

Nll = NDArray[np.float32]

FINALISTS = 4  # policies that are measured again on the select text
OPPONENTS = 3  # of each kind, for checks on further texts
FALSE = 0.05  # chance that any of the rows called behind is not
FRONT = 6  # members of the search front that go to the report
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


@dataclass(frozen=True)
class Candidate:
    """A policy that may be in the report."""

    name: str
    kind: Kind
    policy: Policy
    key: str
    speed: float | None = None


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

    def go(self, trials: list[Trial]) -> dict[str, Any]:
        """All stages; returns what `measured.json` keeps, decode speed aside."""
        recommended = self._recommend(trials)
        front = self._front(trials)
        chosen = self._chosen(trials, {*front[:FRONT], recommended})
        frozen = {
            "schema": SCHEMA,
            "recommended": recommended,
            "search_front": front,
            "rows": [c.name for c in chosen],
        }
        write_atomic(self.folder.path / "frozen.json", json.dumps(frozen, indent=1) + "\n")
        rows, dropped = self._report(chosen, recommended)
        named = {r["name"] for r in rows}
        chosen = [c for c in chosen if c.name in named]
        return {
            "schema": SCHEMA,
            "rows": rows,
            "recommended": recommended if recommended in named else None,
            "extra_text": self._extra_texts(chosen, recommended),
            "compared": [c.name for c in chosen if c.kind != "full"],
            "dropped": dropped,
        }

    def _within(self, trials: list[Trial]) -> list[Trial]:
        """Policies within the budget on the most windows: only they can be compared."""
        limit = self.setting.budget_bytes or 0
        done = [t for t in trials if t.state == "complete" and t.nll is not None]
        return most_measured([t for t in done if (t.bytes_peak or 0) <= limit])

    def _recommend(self, trials: list[Trial]) -> str | None:
        """Measure the best few within the budget on the select text; the best on both texts.

        That a policy is among the few is partly chance on the search text, but the same chance for
        all of them: losses there are as good evidence of their order as on as much other text.
        """
        best = sorted(self._within(trials), key=lambda t: t.nll or 0.0)[:FINALISTS]
        policies = [t.policy for t in best]
        failures = self._measure(self.select, "choose on other text", policies, resident=False)
        scores = {
            t.name: self._loss(("search", self.select), t.fingerprint)
            for t in best
            if t.fingerprint not in failures
        }
        return min(scores, key=lambda n: scores[n], default=None)

    def _front(self, trials: list[Trial]) -> list[str]:
        """Names on the front of the search within the budget, least loss first."""
        within = self._within(trials)
        points = [(float(t.bytes_peak or 0), t.nll or 0.0, -(t.speed or 0.0)) for t in within]
        order = sorted(nondominated(points), key=lambda i: within[i].nll or 0.0)
        return [within[i].name for i in order]

    def _chosen(self, trials: list[Trial], keep: set[str | None]) -> list[Candidate]:
        """The full cache, all baselines, and the trials named in `keep`."""
        chosen = [self._full]
        for t in trials:
            baseline = t.kind != "searched" and t.state in ("complete", "pruned", "duplicate")
            if baseline or t.name in keep:
                chosen.append(Candidate(t.name, t.kind, t.policy, t.fingerprint, t.speed))
        return chosen

    def _report(
        self, chosen: list[Candidate], recommended: str | None
    ) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """Measure the rows on one window, on two, on four; who is certainly behind, no further.

        Windows go where they decide: what is stopped is a method that the recommended policy beats
        on the windows of search and report text that both have. That the policy was chosen on the
        search text favours it there, by far less than a certain difference. The best published
        method and the best combination so far always go on: the headline compares with them, on
        report text alone.
        """
        failures: dict[str, str] = {}
        stopped: dict[str, Interval] = {}
        looks = [w for w, _ in rungs(self.setting.tokens, self.windows["report"], self.together)]
        false, done = FALSE / (len(chosen) * len(looks)), 0
        for windows in looks:
            left = [c for c in chosen if c.key not in failures and c.key not in stopped]
            title = "report text" if windows == looks[0] else f"report text, {windows} windows"
            policies = [c.policy for c in left]
            failures |= self._measure("report", title, policies, windows=windows, first=done)
            done = windows
            best = next((c for c in left if c.name == recommended), None)
            if best is None or best.key in failures or windows == looks[-1]:
                continue
            left = [c for c in left if c.key not in failures]
            leads = {k: min((c for c in left if c.kind == k), key=self._reported, default=None)
                     for k in ("method", "combined")}  # fmt: skip
            for c in left:
                if c.kind in ("full", "searched") or c in (best, *leads.values()):
                    continue
                mine, its = self._both(c.key, best.key)
                found = behind(mine, its, score_from=self.score_from, false=false)
                if found is not None:
                    stopped[c.key] = found
        rows = []
        for c in chosen:
            if c.key not in failures:
                _, about = self.folder.load_nll("report", c.key)
                row = {"name": c.name, "kind": c.kind, "fingerprint": c.key, "speed": c.speed}
                end = stopped.get(c.key)
                row |= {} if end is None else {"stopped": plain(end)}
                rows.append({**about, **row, "policy": plain(c.policy)})
        return rows, {c.name: failures[c.key] for c in chosen if c.key in failures}

    def _extra_texts(self, chosen: list[Candidate], recommended: str | None) -> dict[str, Any]:
        """The recommended policy, the best searched one and their opponents on further texts."""
        out: dict[str, Any] = {}
        wanted = self._opponents(chosen, recommended)
        for part, (label, digest) in self.extra.items():
            self._measure(part, f"extra text {label}", [c.policy for c in wanted], resident=False)
            names = [c.name for c in wanted if self.folder.has_nll(part, c.key)]
            out[part] = {"label": label, "names": names, "token_sha256": digest}
        return out

    def _opponents(self, chosen: list[Candidate], recommended: str | None) -> list[Candidate]:
        """Full cache, recommended policy, and the best of each kind on the report text."""
        best = [c for c in chosen if c.kind == "full" or c.name == recommended]
        counts = {"method": OPPONENTS, "combined": OPPONENTS, "earlier": 1, "searched": 1}
        for kind, count in counts.items():
            mine = [c for c in chosen if c.kind == kind]
            best += sorted(mine, key=self._reported)[:count]
        return list({c.name: c for c in best}.values())

    def _both(self, key: str, other: str) -> tuple[Nll, Nll]:
        """NLL of two policies on the windows of search and report text that both have."""
        mine, its = [], []
        for part in ("search", "report"):
            if self.folder.has_nll(part, key) and self.folder.has_nll(part, other):
                a, b = (self.folder.load_nll(part, k)[0] for k in (key, other))
                windows = min(len(a), len(b))
                mine.append(a[:windows])
                its.append(b[:windows])
        return np.concatenate(mine), np.concatenate(its)

    def _reported(self, c: Candidate) -> float:
        """Loss over the full cache on the report text, on the windows that the policy has."""
        full, _ = self.folder.load_nll("report", self._full.key)
        nll, _ = self.folder.load_nll("report", c.key)
        return float((nll - full[: len(nll)])[:, self.score_from - 1 :].mean())

    @property
    def _full(self) -> Candidate:
        full = Policy(name="full")
        return Candidate("full", "full", full, full.fingerprint(self.setting.shape.layers))

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

    def _loss(self, parts: tuple[str, ...], key: str) -> float:
        """Mean over the scored tokens of all `parts`."""
        nll = np.concatenate([self.folder.load_nll(part, key)[0] for part in parts])
        return float(nll[:, self.score_from - 1 :].mean())
