"""From the files of a run to the summary that reports draw. Nothing is measured here."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from math import hypot
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from kvsearch.app.report_windows import looks
from kvsearch.errors import RunError
from kvsearch.evaluation.measurement import Answered, kept
from kvsearch.files import write_atomic
from kvsearch.pareto import front
from kvsearch.policy import ModelShape, check, layout
from kvsearch.policy_search import run_files
from kvsearch.policy_search.folder import RunFolder
from kvsearch.policy_search.run_files import Measured, MeasuredRow
from kvsearch.records import (
    REPORT,
    Curve,
    Discordant,
    Interval,
    MeasuredPolicy,
    Needle,
    Recheck,
    Row,
    Summary,
    Trial,
    columns,
)
from kvsearch.stats import (
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
    wilson,
)


class Unfinished(RunError):
    """A run that has measured nothing on the report text yet."""


def shape_from(model: dict[str, Any]) -> ModelShape:
    """The shape that a run recorded."""
    return ModelShape(**model["shape"])


def read(folder: RunFolder) -> Summary:
    """Rebuild the summary of a finished run.

    Raises:
        Unfinished: the folder holds no finished run.
        KvsearchError: it is damaged.
    """
    try:
        asked = run_files.study(folder.path / "study.json")
        measured = run_files.measured(folder.path / "measured.json")
    except FileNotFoundError as e:
        raise Unfinished(
            f"{folder.path} holds no finished run ({Path(e.filename).name} is missing); run the "
            "same `kvsearch run` again to finish it"
        ) from e
    for m in measured.rows:
        check(m.policy, shape_from(asked["model"]))
    return build(folder, asked, measured)


def build(
    folder: RunFolder, asked: dict[str, Any], measured: Measured, part: str = "report"
) -> Summary:
    """The summary of rows that were measured on a part of the text or prompts.

    Args:
        folder: of the run, with its losses.
        asked: its `study.json`.
        measured: its `measured.json`, or what of it there is.
        part: where the rows were measured.
    """
    shape = shape_from(asked["model"])
    start = int(asked["settings"]["score_from"]) - 1
    trials = folder.trials()
    searched = {t.fingerprint: t.dnll for t in trials if t.dnll is not None}
    nll = {m.name: folder.losses(part, m.fingerprint, start) for m in measured.rows}
    _alike(nll, folder.path)
    most = nll[measured.recommended or "full"]  # through it all rows are compared
    tokens = (asked["settings"]["context"], asked["settings"].get("prompt", 0))
    points = {
        m.name: (
            layout(m.policy, shape).bytes_peak(*tokens),
            sum(x.mean() for x in through(nll[m.name], most)),
        )
        for m in measured.rows
    }
    names = list(points)
    on_front = {names[i] for i in front([points[n] for n in names])}
    methods = [m.name for m in measured.rows if m.kind == "method"]
    level = corrected(len(names) - 1)
    spread = spread_of(nll.values(), most, nll["full"])
    answers = {m.name: m.answers for m in measured.rows}
    of_best = answers.get(measured.recommended or "", ())
    rows = [
        _row(
            m, asked, shape, nll, most, points, methods, m.name in on_front, searched, level,
            spread, answers["full"], of_best,
        )
        for m in measured.rows
    ]  # fmt: skip
    return Summary(
        model=asked["model"],
        text=asked["text"],
        settings={
            **asked["settings"],
            "versions": asked["versions"],
            "intervals_corrected_for_rows": len(names) - 1,
        },
        budget_bytes=asked["settings"]["budget_bytes"],
        rows=sorted(rows, key=lambda r: r.nll),
        trials=trials,
        recommended=measured.recommended,
        counts=Counter(t.state for t in trials),
        rechecks=_rechecks(folder, measured, nll, start, _looks(asked), spread),
        seconds=measured.seconds,
        resumed=measured.resumed,
        importances=run_files.importances(folder.path / "importances.json"),
        behind=measured.behind,
        dropped=measured.dropped,
        curves=_curves(folder, measured, points, nll, start, part),
        needles=measured.needles,
        examples=tuple(measured.examples),
    )


def _curves(
    folder: RunFolder,
    measured: Measured,
    points: Mapping[str, tuple[int, float]],
    nll: Mapping[str, Blocks],
    start: int,
    part: str,
) -> tuple[Curve, ...]:
    """Policies at several sizes, all on the windows that every size has."""
    found = []
    for m in measured.sizes:
        sized = {x.bytes: folder.losses(part, x.fingerprint, start) for x in m.sizes} | {
            points[m.name][0]: nll[m.name]
        }
        few = min(sized.values(), key=lambda x: len(x.sums))
        at = []
        for size, losses in sized.items():
            mine, _ = common(losses, few)
            at.append((size, mine.mean() - common(nll["full"], few)[0].mean()))
        found.append(Curve(m.name, tuple(sorted(at))))
    return tuple(found)


def write_tables(summary: Summary, folder: Path) -> None:
    """Write `trials.parquet` and, if one is recommended, `best.json`."""
    types = {f.name: _arrow(f.type) for f in fields(Trial)}
    found = columns(Trial, summary.trials)
    table = pa.table({name: pa.array(found[name], type=types[name]) for name in found})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    write_atomic(folder / "trials.parquet", sink.getvalue().to_pybytes())
    if summary.recommended is not None:
        row = summary.row(summary.recommended)
        about = {
            "model": summary.model["name"],
            "nll": row.nll,
            "dnll_full": row.dnll_full.mean,
            "bytes_peak": row.bytes_peak,
            "tokens": row.tokens,
        }
        best = row.policy.model_copy(update={"name": row.name, "about": about})
        write_atomic(folder / "best.json", best.to_json())
        if best.rule is not None and best.rule.files:
            from kvsearch.models.learned import beside  # loads torch

            best.rule.lies_in(folder)  # where an earlier report left them, perhaps elsewhere
            for name, data in beside(best).items():
                write_atomic(folder / name, data)


def _arrow(kind: Any) -> pa.DataType:
    """The type of a column, also where nothing in it is known; what is no number is text."""
    kinds = get_args(kind) or (kind,)
    return pa.int64() if int in kinds else pa.float64() if float in kinds else pa.string()


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


def _longest(names: list[str], nll: Mapping[str, Blocks]) -> list[str]:
    """Those on the most windows: the others are certainly behind, and little is known of them."""
    most = max((len(nll[n].sums) for n in names), default=0)
    return [n for n in names if len(nll[n].sums) == most]


def _row(
    m: MeasuredRow,
    asked: dict[str, Any],
    shape: ModelShape,
    nll: dict[str, Blocks],
    most: Blocks,
    points: dict[str, tuple[int, float]],
    methods: list[str],
    on_front: bool,
    searched: Mapping[str, float],
    level: float,
    spread: Spread | None,
    full_answers: Sequence[Answered],
    best_answers: Sequence[Answered],
) -> Row:
    name, mine = m.name, nll[m.name]
    parts = through(mine, most)
    peak = points[name][0]
    limit = max(peak, asked["settings"]["budget_bytes"])
    rivals = [n for n in methods if n != name and points[n][0] <= limit]
    rivals = _longest(rivals, nll)
    best = min(rivals, key=lambda n: points[n][1], default=None)
    mean = points[name][1]
    answered = _answered(m.answers, mine, nll["full"], full_answers)
    if best_answers and best_answers is not m.answers:
        answered["discordant"] = _discordant(m.answers, best_answers)
    return Row(
        **{f.name: getattr(m, f.name) for f in fields(MeasuredPolicy)},
        tokens=mine.size,
        nll=mean,
        nll_se=hypot(*(standard_error(x) for x in parts)),
        blocks=min(long_blocks(x).count for x in parts),
        ppl=float(np.exp(mean)),
        dnll_full=interval(*through(mine, most, nll["full"]), level=level, spread=spread)
        if name != "full"
        else Interval(0.0, 0.0, 0.0),
        dnll_best=paired(*common(mine, nll[best]), level=level, spread=spread) if best else None,
        best=best,
        search_dnll=searched.get(m.fingerprint),
        bytes_peak=peak,
        bytes_mean=layout(m.policy, shape).bytes_mean(
            asked["settings"]["context"], asked["settings"].get("prompt", 0)
        ),
        slots16=peak / shape.budget_bytes(1),
        on_front=on_front,
        within_budget=peak <= asked["settings"]["budget_bytes"],
        windows=len(mine.sums),
        **answered,
    )


def _answered(
    answers: Sequence[Answered],
    mine: Blocks,
    full: Blocks,
    full_answers: Sequence[Answered],
) -> dict[str, Any]:
    """Answers of a row on prompts, in all and by workload; nothing on a text.

    An item's loss is a share of its context times the weight of its workload, and the mean over
    all items is the weighted one over workloads.
    """
    if not answers:
        return {}
    gap = (mine.sums - full.sums[: len(mine.sums)])[:, 0]
    names = list(dict.fromkeys(a.of for a in answers))
    found = []
    for name in names:
        at = [i for i, a in enumerate(answers) if a.of == name]
        lost = paired(gap[at, None] / answers[at[0]].weight, np.zeros((len(at), 1)))
        found.append(kept(name, lost, [answers[i] for i in at], [full_answers[i] for i in at]))
    exact = [x for a in answers for x in a.exact]
    needles = tuple(Needle(a.of, *a.needle, a.exact[0]) for a in answers if a.needle)
    return {
        "exact": wilson(sum(exact), len(exact)), "workloads": tuple(found), "needles": needles
    }  # fmt: skip


def _discordant(mine: Sequence[Answered], best: Sequence[Answered]) -> Discordant:
    """Exact answers of a row against the recommended one's, on contexts that both have."""
    pairs = [
        (x, y)
        for a, b in zip(mine, best, strict=False)
        for x, y in zip(a.exact, b.exact, strict=True)
    ]
    row, its = sum(x and not y for x, y in pairs), sum(y and not x for x, y in pairs)
    return Discordant(row, its, mcnemar(row, its))


def _looks(asked: dict[str, Any]) -> int:
    """How often the headline may have been looked at, where there were windows for it alone."""
    s = asked["settings"]
    return len(looks(s["report_windows"], s["headline_windows"])) if "headline_windows" in s else 1


def _rechecks(
    folder: RunFolder,
    measured: Measured,
    report: dict[str, Blocks],
    start: int,
    often: int,
    spread: Spread | None,
) -> list[Recheck]:
    """The recommended policy against the best of each kind, on the report text and on others."""
    best = measured.recommended
    if best is None:
        return []
    out = []
    kinds = {m.name: m.kind for m in measured.rows}
    keys = {m.name: m.fingerprint for m in measured.rows}
    compared, extra = measured.compared, measured.extra_text
    for text in ("report", *extra):
        if text == "report":
            nll, label, its = report, REPORT, spread
        else:
            label = extra[text].label
            names = [n for n in extra[text].names if folder.has_losses(text, keys[n])]
            nll = {n: folder.losses(text, keys[n], start) for n in names}
            _alike(nll, folder.path)
            its = (
                spread_of(nll.values(), nll[best], nll["full"])
                if {best, "full"} <= nll.keys()
                else None
            )
        for kind in ("method", "combined", "earlier"):
            rivals = [n for n in nll if kinds[n] == kind and n != best and n in compared]
            rivals = _longest(rivals, nll)
            if best in nll and rivals:
                rival = min(rivals, key=lambda n: nll[n].mean())
                a, b = common(nll[best], nll[rival])
                level = corrected(often if text == "report" and kind != "earlier" else 1)
                found = paired(a, b, level=level, spread=its)
                out.append(Recheck(label, best, rival, found, a.size))
        if best in nll and "full" in nll and best != "full":
            a, b = common(nll[best], nll["full"])
            out.append(Recheck(label, best, "full", paired(a, b, spread=its), a.size))
    return out
