"""The summary of kept runs whose rows have different numbers of windows, and what has no row."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvsearch.commands.evaluated import Evaluated, EvaluateResult, Workload
from kvsearch.policy import Policy
from kvsearch.report.html import render
from kvsearch.report.pareto_plot import picture
from kvsearch.report.terminal import closing, results_table
from kvsearch.results.folder import RunFolder
from kvsearch.results.intervals import common, mcnemar
from kvsearch.results.records import Discordant, Interval, Kept, Trial
from kvsearch.results.summary import Summary
from kvsearch.run import summarise
from tests.report_cases import IMAGES, asked

STUDY = Path(__file__).resolve().parents[2] / "studies" / "2026-11-first-command"
RUNS = sorted(p for part in ("records", "four-windows") for p in (STUDY / part).iterdir())
RUN = STUDY / "records" / "wikitext-3"  # its rows have 1, 2, 4, 8 and 16 windows


def words(found: Summary) -> tuple[str, str]:
    """The report page without its line breaks, and what the terminal shows."""
    shape = found.study.shape
    html = render(found, shape, IMAGES, picture(found, shape))
    return " ".join(html.split()), closing(found, Path("run"))


@pytest.mark.parametrize("run", RUNS, ids=lambda p: f"{p.parent.name}-{p.name}")
def test_a_row_is_ahead_of_the_recommended_one_only_if_it_is_on_windows_of_both(run: Path) -> None:
    """A policy on four easy windows was shown ahead of the recommended one on sixteen."""
    folder = RunFolder(run, write=False)
    found = summarise.read(folder)
    start = found.settings.score_from - 1
    best, ahead = found.row(found.recommended or ""), []
    for row in found.rows:
        mine, its = common(*(folder.losses("report", r.fingerprint, start) for r in (row, best)))
        behind = mine.mean() - its.mean()
        assert row.nll - best.nll == pytest.approx(behind, abs=1e-9), row.name
        assert row.dnll_full.mean - best.dnll_full.mean == pytest.approx(behind, abs=1e-9)
        if behind < 0 and row.bytes_peak <= best.bytes_peak:
            ahead.append(row.name)
    assert best.on_front == (not ahead)
    assert found.rows == sorted(found.rows, key=lambda r: r.nll)


def test_every_row_says_on_how_many_tokens_it_was_measured() -> None:
    found = summarise.read(RunFolder(RUN, write=False))
    html, terminal = words(found)
    assert {r.windows for r in found.rows} == {1, 2, 4, 8, 16}
    assert "measured on 1 to 16 windows of 1,536 tokens" in html
    assert ": 7 on 1, 3 on 2, 6 on 4, 1 on 8, 3 on 16." in html
    assert "which all rows share" not in html and "few of them" not in html
    shown = {r.name: r for r in found.rows}
    for line in terminal.splitlines():
        row = shown.pop(line[2:24].strip(), None)
        assert row is None or f" {row.tokens}" in line[70:90], line
    assert not shown
    for text in (html, terminal):
        assert "placed by their paired difference" in text


@pytest.mark.parametrize(
    ("run", "said"),
    [
        ("four-windows/sotu-1", "trial 20, against the best policy that the search began with, "),
        ("records/built-in", "trial 16, against the best policy that the search began with, "),
    ],
    ids=["a proposal is recommended", "a starting point is recommended"],
)
def test_what_proposals_gained_is_said_also_where_it_is_nothing(run: str, said: str) -> None:
    found = summarise.read(RunFolder(STUDY / run, write=False))
    gain, best = found.gain, found.recommended
    assert gain is not None and best in (gain.policy, gain.against) and gain.dnll.undecided
    starts = [r for r in found.rows if r.kind in ("earlier", "combined", "method")]
    least = min((r for r in starts if r.within_budget), key=lambda r: r.nll)
    assert gain.against == least.name and found.row(gain.policy).kind == "searched"
    for text in words(found):
        assert f"he best of 6 proposals, {said}{gain.against}: dNLL" in text
        assert "(no clear difference), n = 5,120" in text
    trials = [t for t in found.trials if t.kind != "searched"]
    rows = [r for r in found.rows if r.kind != "searched"]
    none = replace(found, trials=trials, rows=rows, recommended=gain.against, rechecks=[])
    assert all("o policy was proposed beyond those" in text for text in words(none))


def test_what_was_left_out_is_named_with_the_reason() -> None:
    found = summarise.read(RunFolder(RUN, write=False))
    full = Policy()

    def trial(name: str, error: str, kind: str = "method", state: str = "rejected") -> Trial:
        return Trial(0, name, kind, state, full, "", error=error)  # type: ignore[arg-type]

    few = "budget too small: field slots: {} slots are fewer than the 64 that interval 32 needs"
    gone = [
        trial("snapkv", few.format(63)),
        trial("xmu", few.format(61), "combined"),
        trial("tova", "the evaluator was killed\ntwice", state="failed"),
        trial("trial 90", few.format(60), "searched"),
    ]
    assert not any("left out" in text.lower() for text in words(found))
    lost = replace(found, trials=[*found.trials, *gone], dropped={"earlier-1": "loss is nan"})
    said = (
        "snapkv, xmu (budget too small); tova (the evaluator was killed twice); "
        "earlier-1 (loss is nan)"
    )
    html, terminal = words(lost)
    assert f"Left out of the comparison: {said}." in html
    assert f"  left out: {said}; " in terminal


def test_the_terminal_says_what_prompts_lose_beside_nll() -> None:
    """Flips, KL divergence, and exact answers against the best published method."""
    found, share = summarise.read(RunFolder(RUN, write=False)), Interval(0.5, 0.4, 0.6)
    kept = Kept("qa", Interval(0.1, 0.0, 0.2), share, 0.034, 24, 0.0217)
    rival = found.against("method")
    rows = [
        replace(
            r,
            exact=share,
            workloads=(kept,),
            discordant=Discordant(2, 7, mcnemar([1] * 2 + [-1] * 7)),
        )
        for r in found.rows
    ]
    told = closing(replace(asked(found, "settings", see="aware"), rows=rows), Path("run"))
    assert "to the full cache: flips 3.4 % of answer tokens, KL divergence 0.022 nats" in told
    assert (
        rival is not None
        and (
            f"only one of the two gives exactly: 7 by {found.recommended}, 2 by {rival.against} "
            "(McNemar's exact test, p = 0.18)"
        )
        in told
    )
    work = Workload(
        name="qa", items=9, tokens=640, scored=24, digest="", full=0.1, see="aware", empty=2.0,
        passes=True, full_exact=1.0,
    )  # fmt: skip
    asks = [
        Evaluated(
            policy=name, fingerprint="", workload="qa", nll=0.3, dnll_full=share, bytes_peak=9,
            bytes_peak_text=9, bytes_mean=9, bytes_asked=9, bytes_resident=9, bytes_prompt=9,
            slots16=1.0, within_budget=None, seconds=1.0, impls={}, lost=share, exact=share,
            flips=0.1, asks=24, kl=kl,
        )
        for name, kl in (("h2o", 0.5123), ("tova", 0.25), ("mine", None))
    ]  # fmt: skip
    told = results_table(EvaluateResult(asks, [work], {}).document())
    assert "KL divergence to the full cache, nats a token: h2o 0.512, tova 0.250\n" in told
