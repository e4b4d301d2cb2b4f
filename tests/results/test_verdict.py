"""Whether a recommendation is within its limits: the words, and the smallest size that is."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvsearch.commands import run
from kvsearch.report.html import render
from kvsearch.report.pareto_plot import picture
from kvsearch.report.terminal import closing, standing
from kvsearch.results.limits import far_behind, judged
from kvsearch.results.records import Curve, Discordant, Interval, Kept, Limits
from kvsearch.results.summary import Summary
from tests.command import call
from tests.report_cases import IMAGES, SHAPE, asked, make_summary

BEST = "trial 31"  # loses 0.041 nats, with an interval of 0.008 around it: 3.3 to 5.0 per cent


def words(found: Summary) -> list[str]:
    html = render(found, SHAPE, IMAGES, picture(found, SHAPE))
    return [" ".join(html.split()), closing(found, Path("run"))]


@pytest.mark.parametrize(
    ("allowed", "holds", "said"),
    [
        (6, "certainly", "certainly within the limit of 6 %"),
        (4.5, "perhaps", "perhaps within the limit of 4.5 %"),
        (3, "no", "not within the limit of 3 %"),
    ],
)
def test_a_limit_is_held_certainly_perhaps_or_not(allowed: float, holds: str, said: str) -> None:
    found = replace(make_summary(), limits=Limits(allowed))
    verdict = judged(found)
    assert verdict is not None and verdict.holds == holds
    assert verdict.losses[0].most == pytest.approx(math.expm1(found.row(BEST).dnll_full.hi))
    for text in words(found):
        assert said in text
        assert ("Nothing tried" in text) == (holds == "no") == ("is within the limits;" in text)
    begun = "\n".join(standing(replace(found, open="not all is measured")))
    assert ("least lost" in begun) == (holds == "no") != ("recommended" in begun)


def test_the_smallest_measured_size_that_holds_is_named() -> None:
    found, peak = make_summary(), make_summary().row(BEST).bytes_peak
    curve = Curve(BEST, ((peak // 2, 0.09), (peak, 0.041), (2 * peak, 0.02), (3 * peak, 0.001)))
    found = replace(found, limits=Limits(3), curves=(curve,))
    verdict = judged(found)
    assert verdict is not None and verdict.bytes == 2 * peak
    slots = 2 * found.row(BEST).slots16
    assert all(f"--budget {slots:.0f}." in text for text in words(found))
    none = replace(found, limits=Limits(0.01))
    assert all("No size of it that was measured is within" in text for text in words(none))


def test_of_answers_the_context_lost_and_the_divergence_count() -> None:
    found = make_summary()
    share = Interval(0.75, 0.5, 0.9)
    text = Kept("text", Interval(0.01, 0.0, 0.02), ppl=9.0, dnll=Interval(0.01, 0.005, 0.015))
    facts = Kept("facts", Interval(0.03, -0.01, 0.07), exact=share, flips=0.04, asks=8, kl=0.02)
    full = replace(
        found.row("full"),
        workloads=(text, facts),
        discordant=Discordant(only_recommended=2, only_row=1, p=0.5),
    )
    rows = [
        full if r.kind == "full" else replace(r, workloads=(text, facts)) for r in found.rows
    ]  # fmt: skip
    found = asked(replace(found, rows=rows), "settings", see="agnostic")
    verdict = judged(found)
    assert verdict is not None and verdict.holds == "perhaps"  # 7 % of the context at most
    assert [(x.of, x.unit) for x in verdict.losses] == [("text", "PPL"), ("facts", "context")]
    assert "5 of 6 facts that the full cache gives are kept, 4.0 % of answer tokens" in verdict.text
    strict = judged(replace(found, limits=Limits(10, 0.01)))
    assert strict is not None and strict.holds == "no"
    assert "limits of 0.01 nats of KLD and 10 %" in strict.text


def test_a_starting_point_that_is_far_behind_is_named() -> None:
    found = make_summary()
    trials = [replace(found.trials[0], name="mean+k5v4", kind="earlier", dnll=2.8)]
    assert "mean+k5v4 +2.80" in far_behind(replace(found, trials=trials))
    assert not far_behind(replace(found, trials=[replace(trials[0], dnll=0.2)]))


@pytest.mark.parametrize(("allowed", "exits"), [(6, 0), (4.5, 0), (3, 3)])
def test_strict_exits_with_3_where_nothing_holds(
    allowed: float, exits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    summary = replace(make_summary(), limits=Limits(allowed))
    monkeypatch.setattr(run, "search", lambda _: run.SearchResult(summary, tmp_path))
    code, out, _ = call(["run", "--strict", "--json"], capsys)
    assert code == exits and (json.loads(out)["verdict"]["holds"] == "no") == bool(exits)
    assert call(["run"], capsys)[0] == 0
    for wrong in ("0", "nan", "lots", "101"):
        code, _, err = call(["run", "--max-drop", wrong], capsys)
        assert code == 2 and "--max-drop" in err and err.count("\n") == 1


def test_without_a_recommendation_there_is_nothing_to_judge() -> None:
    assert judged(make_summary(recommended=None)) is None
