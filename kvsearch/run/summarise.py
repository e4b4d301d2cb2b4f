"""From the files of a run to the summary that reports draw. Nothing is measured here."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import numpy as np

from kvsearch.errors import RunError
from kvsearch.options import study as studies
from kvsearch.options.run_config import RunConfig
from kvsearch.policy import check, layout
from kvsearch.results import run_files
from kvsearch.results.compare import Comparison, Entry
from kvsearch.results.folder import RunFolder
from kvsearch.results.intervals import Blocks, corrected
from kvsearch.results.records import (
    REPORT,
    Curve,
    Kind,
    Limits,
    MeasuredPolicy,
    Needle,
    Recheck,
    Row,
)
from kvsearch.results.run_files import Measured
from kvsearch.results.study import Settings, Study
from kvsearch.results.summary import Summary
from kvsearch.run.report_windows import looks


class Unfinished(RunError):
    """A run that has measured nothing on the report text yet."""


def read(folder: RunFolder) -> Summary:
    """Rebuild the summary of a finished run.

    Raises:
        Unfinished: the folder holds no finished run.
        KvsearchError: it is damaged.
    """
    try:
        study = studies.read(folder.path / "study.json")
        measured = run_files.measured(folder.path / "measured.json")
    except FileNotFoundError as e:
        raise Unfinished(
            f"{folder.path} holds no finished run ({Path(e.filename).name} is missing); run the "
            "same `kvsearch run` again to finish it"
        ) from e
    for m in measured.rows:
        check(m.policy, study.shape)
    return build(folder, study, measured)


def build(folder: RunFolder, study: Study, measured: Measured, part: str = "report") -> Summary:
    """The summary of rows that were measured on a part of the text or prompts.

    Args:
        folder: of the run, with its losses.
        study: its `study.json`.
        measured: its `measured.json`, or what of it there is.
        part: where the rows were measured.
    """
    of, trials = _Report(folder, study, measured, part), folder.trials()
    searched = {t.fingerprint: t.dnll for t in trials if t.dnll is not None}
    rows = [of.row(m, searched.get(m.fingerprint)) for m in measured.rows]
    return Summary(
        study=study,
        rows=sorted(rows, key=lambda r: r.nll),
        trials=trials,
        recommended=measured.recommended,
        counts=Counter(t.state for t in trials),
        rechecks=of.rechecks(_looks(study.settings)),
        seconds=measured.seconds,
        resumed=measured.resumed,
        importances=run_files.importances(folder.path / "importances.json"),
        behind=measured.behind,
        dropped=measured.dropped,
        curves=of.curves(),
        examples=tuple(measured.examples),
        limits=limits_of(studies.config_of(study)),
    )


def limits_of(config: RunConfig) -> Limits:
    """What the recommended policy of a run may lose."""
    return Limits(config.max_drop, config.max_kld)


def comparison(folder: RunFolder, study: Study, measured: Measured) -> Comparison:
    """The rows that were measured on the report part, compared; arguments are those of `build`."""
    return _Report(folder, study, measured, "report").compared


class _Report:
    """The rows of a report, and what they are compared by."""

    def __init__(self, folder: RunFolder, study: Study, measured: Measured, part: str) -> None:
        self.folder, self.measured, self.part = folder, measured, part
        settings, self.shape = study.settings, study.shape
        self.budget, self.start = settings.budget_bytes, settings.score_from - 1
        self.tokens = settings.context, settings.prompt
        self.rows = {m.name: m for m in measured.rows}
        self.compared = self._comparison(part, list(self.rows), answers=True)

    def row(self, m: MeasuredPolicy, search_dnll: float | None) -> Row:
        """A row with its figures."""
        name, of = m.name, self.compared
        mine, mean, best = of.entries[name], of.loss[name], of.best("method", name)
        error, blocks = of.error(name)
        return Row(
            **{f.name: getattr(m, f.name) for f in fields(MeasuredPolicy)},
            tokens=mine.losses.size,
            nll=mean,
            nll_se=error,
            blocks=blocks,
            ppl=math.exp(mean),
            dnll_full=of.over_full(name),
            dnll_best=None if best is None else of.difference(name, best, of.level),
            best=best,
            search_dnll=search_dnll,
            bytes_peak=mine.bytes_peak,
            bytes_mean=layout(m.policy, self.shape).bytes_mean(*self.tokens),
            slots16=mine.bytes_peak / self.shape.budget_bytes(1),
            on_front=name in of.front,
            within_budget=mine.bytes_peak <= self.budget,
            windows=len(mine.losses.sums),
            exact=of.exact(name),
            workloads=of.kept(name),
            discordant=of.discordant(name),
            needles=tuple(Needle(a.of, *a.needle, a.exact[0]) for a in mine.answers if a.needle),
        )

    def curves(self) -> tuple[Curve, ...]:
        """Policies at several sizes, all on the windows that every size has."""
        found, full = [], self.compared.entries["full"].losses
        for m in self.measured.sizes:
            sized = {x.bytes: self._losses(self.part, x.fingerprint) for x in m.sizes}
            own = self.compared.entries[m.name]
            sized |= {own.bytes_peak: own.losses}
            few = min(len(x.sums) for x in sized.values())
            points = [
                (size, losses.first(few).mean() - full.first(few).mean())
                for size, losses in sized.items()
            ]
            found.append(Curve(m.name, tuple(sorted(points))))
        return tuple(found)

    def rechecks(self, often: int) -> list[Recheck]:
        """The recommended policy against the best of each kind, on the report text and on others.

        Args:
            often: how often the headline may have been looked at.
        """
        best = self.measured.recommended
        if best is None:
            return []
        out = _rechecks(self.compared, best, REPORT, often)
        for part, text in self.measured.extra_text.items():
            names = [
                n for n in text.names if self.folder.has_losses(part, self.rows[n].fingerprint)
            ]
            if {best, "full"} <= {*names}:
                out += _rechecks(self._comparison(part, names), best, text.label, 1)
        return out

    def _comparison(self, part: str, names: list[str], *, answers: bool = False) -> Comparison:
        found = {}
        for m in (self.rows[n] for n in names):
            found[m.name] = Entry(
                m.kind,
                layout(m.policy, self.shape).bytes_peak(*self.tokens),
                self._losses(part, m.fingerprint),
                self.folder.answers(part, m.fingerprint) if answers else (),
                stopped=m.stopped is not None and part == self.part,
            )
        _alike({n: e.losses for n, e in found.items()}, self.folder.path)
        return Comparison(found, self.measured.recommended, self.budget)

    def _losses(self, part: str, fingerprint: str) -> Blocks:
        return self.folder.losses(part, fingerprint, self.start)


def _rechecks(of: Comparison, best: str, text: str, often: int) -> list[Recheck]:
    """The recommended policy against the best of each kind on one text; on that of the report also
    the best proposal against it, where it is a starting point.
    """
    kinds: tuple[Kind, ...] = ("method", "combined", "earlier")
    levels = {of.best(kind): corrected(1 if kind == "earlier" else often) for kind in kinds}
    levels |= {"full": corrected(1)} if best != "full" else {}
    pairs = [(best, rival, level) for rival, level in levels.items() if rival is not None]
    proposal = of.best("searched")
    if text == REPORT and proposal is not None and of.entries[best].kind != "searched":
        pairs.append((proposal, best, corrected(1)))
    return [
        Recheck(text, a, b, of.difference(a, b, level), of.tokens(a, b)) for a, b, level in pairs
    ]


def _alike(nll: Mapping[str, Blocks], folder: Path) -> None:
    """Refuse losses of windows of different lengths, which cannot be of one text."""
    for name, found in nll.items():
        first = next(iter(nll.values()))
        if not found.sums.size or not np.array_equal(found.tokens, first.tokens):
            raise RunError(
                f"{folder} is damaged: the losses of {name} are of other windows than those of "
                f"{next(iter(nll))}; restore its files in nll, or run the search again with "
                "another --out"
            )


def _looks(of: Settings) -> int:
    """How often the headline may have been looked at, where there were windows for it alone."""
    return 1 if of.headline_windows is None else len(looks(of.report_windows, of.headline_windows))
