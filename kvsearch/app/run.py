"""`kvsearch run`: search, choose, report. Every stage leaves its results in the folder."""

import hashlib
import json
import platform
import time
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsearch.app import inputs, summary
from kvsearch.app.progress import Shown
from kvsearch.errors import KvsearchError, TextError
from kvsearch.evaluate import sensitivity, throughput
from kvsearch.evaluate.quality import Evaluator, check_finite
from kvsearch.files import write_atomic
from kvsearch.knobs import Setting
from kvsearch.methods import METHODS, at
from kvsearch.pareto import front
from kvsearch.policy import Policy
from kvsearch.records import Kind, Summary, Trial, plain
from kvsearch.report import write_report
from kvsearch.search.folder import RunFolder
from kvsearch.search.loop import RUNG, Search, Task
from kvsearch.space import load as load_space
from kvsearch.text import read_file, tokenize, windows

FINALISTS = 4  # policies that are measured again on the select text
OPPONENTS = 3  # of each kind, for checks on further texts
SENSITIVITY_TOKENS = 768  # of the search text
FRONT = 6  # members of the search front that go to the report


@dataclass(frozen=True)
class RunOptions:
    """What `kvsearch run` was asked; lengths in tokens, budget in fp16 slots per layer."""

    model: str = "smollm2-135m"
    budget: float = 256
    text: inputs.TextOptions = field(default_factory=inputs.TextOptions)
    also: tuple[str, ...] = ()
    space: str = "default"
    trials: int = 8
    seed: int = 0
    score_from: int | None = None
    bench: bool = True
    dtype: str = "auto"
    device: str = "auto"
    batch: int = 1
    out: Path | None = None


@dataclass
class Candidate:
    """A policy on its way to the report."""

    name: str
    kind: Kind
    policy: Policy


class Run:
    """One run from options to a written report."""

    def __init__(self, options: RunOptions, shown: Shown) -> None:
        self.options, self.shown, self.start = options, shown, time.perf_counter()
        self.space = load_space(options.space)  # a typo here must not cost a model load
        context = options.text.context
        inputs_setting_check(options)
        self.loaded = inputs.model(
            options.model,
            dtype=options.dtype,
            device=options.device,
            context=context,
            say=shown.say,
        )
        self.text = inputs.text(self.loaded, options.text, shown.say)
        self.score_from = _score_from(options)
        self.evaluator = Evaluator(self.loaded, batch=options.batch)
        self.setting = inputs.setting(self.loaded, options.budget, context)
        at("window", self.setting)  # a budget that pays for nothing ends here
        asked = self._asked()
        self.folder = RunFolder(options.out or _default_out(options, asked))
        try:
            self.folder.claim(asked)
        except KvsearchError:
            self.folder.close()
            raise

    def go(self) -> Summary:
        """Run all stages; what an earlier run of the same command did is not done again."""
        shown = self.shown
        try:
            self.setting = self._with_sensitivity()
            trials = self._search()
            chosen, recommended = self._choose(trials)
            self._report(chosen, recommended)
            result = summary.read(self.folder)
            with shown.step("report", 1) as step:
                write_report(result, self.folder.path, shape=self.loaded.shape)
                summary.write_tables(result, self.folder.path)
                step.advance()
            return result
        finally:
            self.folder.close()

    def so_far(self) -> list[Trial]:
        """Policies measured on the search text, best first: what an interrupted run knows."""
        done = [t for t in self.folder.trials() if t.state == "complete"]
        return sorted(done, key=lambda t: t.nll or 0.0)

    # -- stages --------------------------------------------------------------------------------

    def _with_sensitivity(self) -> Setting:
        axis = self.space.axes.get("spread")
        if axis is None or "sensitivity" not in (axis.choice or ()):
            return self.setting
        file = self.folder.path / "sensitivity.json"
        if not file.exists():
            short = self.text.search[:1, :SENSITIVITY_TOKENS]
            groups = min(sensitivity.GROUPS, self.loaded.shape.layers)
            with self.shown.step("layer sensitivity", groups + 1) as step:
                found = sensitivity.measure(
                    self.evaluator, short, progress=lambda _: step.advance()
                )
            write_atomic(file, json.dumps({"unit": "mean 1", "per_layer": found}) + "\n")
        per_layer = tuple(json.loads(file.read_text(encoding="utf-8"))["per_layer"])
        s = self.setting
        return Setting(s.shape, s.budget, s.tokens, per_layer, s.prompt)

    def _search(self) -> list[Trial]:
        o = self.options
        task = Task(self.setting, self.text.search, self.score_from, self.space, o.trials, o.seed)
        methods = sum(m.baseline and n != "full" for n, m in METHODS.items())
        with self.shown.step("search", methods + o.trials + 1) as step:

            def watch(trial: Trial, trials: list[Trial]) -> None:
                cost = {"complete": 1.0, "failed": 1.0, "pruned": RUNG}.get(trial.state, 0.0)
                step.advance(1 if trial.kind != "found" else cost, _best(trials))

            return Search(task, self.evaluator, self.folder, watch).run()

    def _choose(self, trials: list[Trial]) -> tuple[list[Candidate], str | None]:
        """Front of the search plus all baselines; the recommended one is chosen on other text."""
        limit = self.setting.budget or 0
        done = [t for t in trials if t.state == "complete" and t.nll is not None]
        within = [t for t in done if (t.bytes_peak or 0) <= limit]
        best = sorted(within, key=lambda t: t.nll or 0.0)[:FINALISTS]
        scores: dict[str, float] = {}
        with self.shown.step("choose on other text", len(best)) as step:
            for t in best:
                nll, _ = self._measure("select", t.policy, t.fingerprint, self.text.select)
                scores[t.name] = float(nll[:, self.score_from - 1 :].mean())
                step.advance()
        recommended = min(scores, key=lambda n: scores[n], default=None)
        order = front([(float(t.bytes_peak or 0), t.nll or 0.0) for t in within])
        members = [within[i] for i in order][-FRONT:]
        keep = (
            {t.name for t in members} | {recommended} | {t.name for t in done if t.kind != "found"}
        )
        chosen = [Candidate("full", "full", Policy(name="full"))]
        chosen += [Candidate(t.name, t.kind, t.policy) for t in done if t.name in keep]
        return [c for i, c in enumerate(chosen) if i == 0 or c.name != "full"], recommended

    def _report(self, chosen: list[Candidate], recommended: str | None) -> None:
        rows, shape = [], self.loaded.shape
        with self.shown.step("report text", len(chosen)) as step:
            for c in chosen:
                key = c.policy.fingerprint(shape.layers)
                _, about = self._measure("report", c.policy, key, self.text.report)
                rows.append(
                    {
                        "name": c.name,
                        "kind": c.kind,
                        "fingerprint": key,
                        "policy": plain(c.policy),
                        **about,
                    }
                )
                step.advance(note=c.name)
        also = self._also(chosen, recommended, rows)
        if self.options.bench and recommended is not None:
            self._bench([r for r in rows if r["name"] == recommended])
        measured = {
            "rows": rows,
            "recommended": recommended,
            "also": also,
            "fits": [c.name for c in chosen if c.kind != "full"],
            "seconds": time.perf_counter() - self.start,
        }
        write_atomic(self.folder.path / "measured.json", json.dumps(measured, indent=1) + "\n")

    def _also(
        self, chosen: list[Candidate], recommended: str | None, rows: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """The recommended policy and its opponents again on further texts."""
        out: dict[str, Any] = {}
        o = self.options.text
        for i, spec in enumerate(self.options.also):
            tokens = tokenize(self.loaded.tokenizer, read_file(spec))
            ids = windows(tokens, count=o.report_windows, length=o.context)
            wanted = self._opponents(chosen, recommended)
            with self.shown.step(f"also {tokens.name}", len(wanted)) as step:
                for c in wanted:
                    key = c.policy.fingerprint(self.loaded.shape.layers)
                    self._measure(f"also{i}", c.policy, key, ids)
                    step.advance(note=c.name)
            out[f"also{i}"] = {
                "label": tokens.name,
                "names": [c.name for c in wanted],
                "token_sha256": tokens.token_sha256,
            }
        return out

    def _opponents(self, chosen: list[Candidate], recommended: str | None) -> list[Candidate]:
        """Full cache, recommended policy, and the best of each kind on the report text."""
        shape, start = self.loaded.shape, self.score_from - 1

        def loss(c: Candidate) -> float:
            nll, _ = self.folder.load_nll("report", c.policy.fingerprint(shape.layers))
            return float(nll[:, start:].mean())

        best = [c for c in chosen if c.kind == "full" or c.name == recommended]
        for kind in ("method", "composite"):
            best += sorted((c for c in chosen if c.kind == kind), key=loss)[:OPPONENTS]
        return list({c.name: c for c in best}.values())

    def _bench(self, rows: list[dict[str, Any]]) -> None:
        pairs, steps = 5, 16
        ids = self.text.report[0]
        context = len(ids) - (pairs + 1) * steps
        if context < 1:
            return
        with self.shown.step("decode speed", len(rows) * (pairs + 1)) as step:
            for row in rows:
                policy = Policy.build(row["policy"])
                found = throughput.measure(
                    self.loaded,
                    policy,
                    ids,
                    context=context,
                    pairs=pairs,
                    steps=steps,
                    progress=lambda _: step.advance(),
                )
                row["decode"] = asdict(found)

    # -- helpers -------------------------------------------------------------------------------

    def _measure(
        self, part: str, policy: Policy, key: str, ids: NDArray[np.int64]
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """NLL of a policy on a part, from the folder if it is there already."""
        if not self.folder.has_nll(part, key):
            q = self.evaluator.quality(policy, ids)
            check_finite(policy.name or key, q)
            about = {"bytes_resident": q.bytes_resident, "seconds": q.seconds, "impls": q.impls}
            self.folder.save_nll(part, key, q.nll, about)
        return self.folder.load_nll(part, key)

    def _asked(self) -> dict[str, Any]:
        o, loaded = self.options, self.loaded
        return {
            "model": {
                "name": loaded.name,
                "origin": loaded.origin,
                "digest": loaded.digest,
                "revision": loaded.revision,
                "dtype": loaded.dtype,
                "device": loaded.device,
                "shape": asdict(loaded.shape),
            },
            "text": inputs.describe(self.text.parts),
            "settings": {
                "budget": o.budget,
                "budget_bytes": self.setting.budget,
                "context": o.text.context,
                "windows": o.text.windows,
                "report_windows": o.text.report_windows,
                "score_from": self.score_from,
                "seed": o.seed,
                "also": [Path(spec).name for spec in o.also],
                "space": self.space.name,
                "space_digest": self.space.digest,
            },
            "trials": o.trials,
            "versions": {
                "python": platform.python_version(),
                **{p: version(p) for p in ("kvsearch", "torch", "transformers", "optuna")},
            },
        }


def inputs_setting_check(options: RunOptions) -> None:
    """Contradictions that need no model."""
    if options.budget <= 0:
        raise KvsearchError(
            f"--budget must be above 0 fp16 slots per layer, got {options.budget:g}"
        )
    _score_from(options)


def _score_from(options: RunOptions) -> int:
    """First scored position: by default the first at which a full budget makes a difference."""
    start = int(options.budget) if options.score_from is None else options.score_from
    if not 1 <= start <= options.text.context - 64:
        raise TextError(
            f"scoring from position {start} leaves fewer than 64 tokens of a "
            f"{options.text.context}-token window; raise --context or lower --budget"
        )
    return start


def _default_out(options: RunOptions, asked: dict[str, Any]) -> Path:
    """The same command finds the same folder; another model, text or budget gets its own."""
    rest = {k: v for k, v in asked.items() if k not in ("versions", "trials")}
    digest = hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()[:6]
    name = Path(options.model).stem if "/" in options.model else options.model
    return Path("runs") / f"{name}-b{options.budget:g}-{digest}"


def _best(trials: list[Trial]) -> str:
    """Best found and best published so far, as a note beside the bar."""

    def top(kinds: tuple[str, ...]) -> str:
        done = [t for t in trials if t.kind in kinds and t.dnll is not None]
        if not done:
            return "-"
        return f"{min(t.dnll for t in done if t.dnll is not None):+.3f}"

    return f"dNLL to full: found {top(('found',))}, published {top(('method',))}"
