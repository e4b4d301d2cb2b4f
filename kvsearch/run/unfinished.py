"""What an unfinished run knows: the same summary, of the rows that there are."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from kvsearch.policy_search.fidelity import comparable, contenders
from kvsearch.results import run_files
from kvsearch.results.folder import RunFolder
from kvsearch.results.records import MeasuredPolicy, Trial
from kvsearch.results.run_files import Measured, measured_row
from kvsearch.results.study import Study
from kvsearch.results.summary import Summary
from kvsearch.run import summarise

OPEN = {
    "search": "The run has not ended. Losses are of the search part, on which policies are chosen, "
    "so they are too low; the selection on another part, the report part and the decode speed are "
    "open.",
    "selected": "The run has not ended. The recommended policy was chosen on the search and the "
    "select part; losses are of the search part, so they are too low. The report part and the "
    "decode speed are open.",
    "report": "The run has not ended. Rows may get more of the report part; the decode speed is "
    "open.",
}


def so_far(folder: RunFolder, study: Study, seconds: float | None = None) -> Summary:
    """What an unfinished run knows.

    Rows are those of the report text once the recommended policy was measured there; before that,
    policies on the search text, none if nothing was compared yet. A policy that the selection chose
    is the recommended one from then on.

    Args:
        folder: of the run.
        study: its `study.json`.
        seconds: since it began; None where it was not measured, as of a killed run.
    """
    shape, trials = study.shape, folder.trials()
    names = {"full": Trial.full(shape.layers)}
    names |= {t.name: t for t in trials if t.state == "complete"}
    try:
        frozen = run_files.frozen(folder.path / "frozen.json")
        chosen, best = frozen.rows, frozen.recommended
    except FileNotFoundError:
        chosen, best = [], None
    part = "report" if best and _has(folder, "report", names, "full", best) else "search"
    stage = "selected" if best in names and part == "search" else part
    if part == "search":
        done = comparable(trials, study.settings.budget_bytes)
        if stage == "search":
            best = min(done, key=lambda t: t.dnll or 0.0).name if done else None
        leads = {t.name for t in contenders(trials, study.settings.budget_bytes)}
        chosen = [n for n, t in names.items() if t.kind != "searched" or n in leads]
    rows = list[MeasuredPolicy]()
    for t in (names[n] for n in chosen if n in names and _has(folder, part, names, n)):
        row = measured_row(t, folder.load_nll(part, t.fingerprint))
        if part == "search":  # measured without packing, and without divergences
            row = replace(row, bytes_resident=None, impls={})
        rows.append(row)
    if len(rows) < 2 or rows[0].name != "full":
        return _empty(study, trials, seconds)
    measured = Measured(rows=rows, recommended=best, seconds=seconds)
    text = study.text.model_copy(update={"report": getattr(study.text, part)})
    known = study.model_copy(update={"text": text})
    return replace(summarise.build(folder, known, measured, part), open=OPEN[stage])


def _has(folder: RunFolder, part: str, names: Mapping[str, Trial], *wanted: str) -> bool:
    return all(n in names and folder.has_nll(part, names[n].fingerprint) for n in wanted)


def _empty(study: Study, trials: list[Trial], seconds: float | None) -> Summary:
    """Before any policy could be compared with the full cache."""
    return Summary(
        study=study,
        rows=[],
        trials=trials,
        recommended=None,
        counts=Counter(t.state for t in trials),
        seconds=seconds,
        open=OPEN["search"],
    )
