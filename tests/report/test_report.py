"""The report of a hand-made summary: figures, wording and whole files."""

import csv
import io
import math
import re
from dataclasses import replace
from html import escape
from pathlib import Path

import pytest
from rich.console import Console

from kvsearch.policy import Policy
from kvsearch.report import write_report
from kvsearch.report.describe import describe
from kvsearch.report.html import render
from kvsearch.report.pareto_plot import picture
from kvsearch.report.screen import Column, table
from kvsearch.report.tables import bytes_text, front_csv, interval_text, sizes_text, verdict
from kvsearch.report.terminal import closing, standing
from kvsearch.results.records import Curve, Interval, Recheck
from kvsearch.results.summary import Summary
from kvsearch.session.progress import Shown
from tests.report_cases import IMAGES, POLICIES, SHAPE, asked, make_summary

PICTURES = True  # are drawn: see conftest.py


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    summary = make_summary()
    return summary, folder, write_report(summary, folder)


def page(summary: Summary) -> str:
    return render(summary, SHAPE, IMAGES, picture(summary, SHAPE))


def test_a_run_folder_holds_every_file_and_policies_read_back(written):
    summary, folder, paths = written
    there = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    assert there == {p.relative_to(folder).as_posix() for p in paths}
    assert {"front.csv", "pareto.png", "pareto.html", "report.html"} <= there
    cells = csv.DictReader(io.StringIO((folder / "front.csv").read_text()))
    for row, cell in zip(summary.rows, cells, strict=True):
        policy = Policy.from_json(folder / cell["policy_file"])
        assert policy.name == row.name and policy.fingerprint() == row.policy.fingerprint()


def test_csv_gives_back_the_same_numbers():
    summary = make_summary()
    cells = list(csv.DictReader(io.StringIO(front_csv(summary.rows))))
    for row, cell in zip(summary.rows, cells, strict=True):
        for field in ("nll", "nll_se", "ppl", "bytes_mean", "slots16", "seconds"):
            assert float(cell[field]) == getattr(row, field)
        assert int(cell["bytes_peak"]) == row.bytes_peak
        d = row.dnll_full
        assert [float(cell[f"dnll_full{e}"]) for e in ("", "_lo", "_hi")] == [d.mean, d.lo, d.hi]
        assert cell["name"] == row.name and bool(int(cell["on_front"])) == row.on_front


def test_page_names_every_row_and_loads_nothing(written):
    summary, folder, _ = written
    html = (folder / "report.html").read_text()
    assert all(f"<b>{escape(row.name)}</b>" in html for row in summary.rows)
    assert "Use trial 31" in html and "PolicyCache.from_json" in html
    assert html.count("data:image/png;base64,") == 2 and html.count("<svg") == 2
    for name in ("report.html", "pareto.html"):
        markup = re.sub(r"<script.*?</script>", "", (folder / name).read_text(), flags=re.S)
        assert not re.search(r"(src|srcset|href|data)\s*=\s*[\"']?(https?:)?//", markup)
        assert "<link" not in markup and "@import" not in markup
    for name in ("report.html", "pareto.html"):
        links = set(re.findall(r'href="([^"]+)"', (folder / name).read_text()))
        assert {f"#policy-{i}" for i in range(len(summary.rows))} <= links
        for link in links:
            file, _, mark = link.partition("#")
            assert not mark or f'id="{mark}"' in (folder / (file or name)).read_text(), link
            assert (folder / file).exists()


def test_nothing_is_better_when_every_interval_includes_zero():
    assert "better" in page(make_summary()).lower()
    unsure = make_summary(sure=False)
    info = picture(unsure, SHAPE)
    words = page(unsure) + front_csv(unsure.rows) + str([p.details for p in info.points])
    assert "better" not in words.lower() and "worse" not in words.lower()
    assert "no clear difference" in words.lower()


def test_the_recommended_policy_has_one_figure_against_the_best_published_method() -> None:
    """The headline called it better, and its row "no clear difference", widened for all rows."""
    made = make_summary(sure=False)
    best = made.row("trial 31").best
    planned = Recheck("report text", "trial 31", best or "", Interval(-0.2, -0.3, -0.1), 5120)
    assert "better than" not in page(made).split("<h2>All policies")[1].split("<h2>")[0]
    table_ = page(replace(made, rechecks=[planned])).split("<h2>All policies")[1].split("<h2>")[0]
    assert table_.count(f"better than {best}") == 1
    assert interval_text(planned.dnll).split(" ", 1)[1] in table_
    assert "without a correction" in table_
    full = Recheck("report text", "trial 31", "full", Interval(0.04, 0.01, 0.07), 5120)
    assert "not distinguishable from that of the full cache" in page(made)
    both = page(replace(made, rechecks=[planned, full]))
    assert "perplexity is 4.1 % above that of the full cache" in both and "[+0.010, +0.070]" in both


def test_a_run_without_a_recommendation_says_so():
    html = page(make_summary(recommended=None))
    assert "No policy is recommended" in html and "PolicyCache" not in html


@pytest.mark.parametrize(
    ("lo", "hi", "word"),
    [
        (-0.2, -0.1, "better"),
        (0.1, 0.2, "worse"),
        (-0.1, 0.1, "no clear difference"),
        (0.0, 0.1, "no clear difference"),
        (-0.1, 0.0, "no clear difference"),
        (-math.inf, -0.1, "no clear difference"),
        (math.nan, -0.1, "no clear difference"),
    ],
)
def test_verdict_needs_an_interval_off_zero(lo, hi, word):
    assert verdict(Interval((lo + hi) / 2, lo, hi)) == word


def test_cells_are_readable():
    assert interval_text(Interval(-0.0001, -0.05, 0.0501)) == (
        "0.000 [\N{MINUS SIGN}0.050, +0.050]"
    )
    assert interval_text(Interval(0.0004, 0.0002, 0.0006)) == "+0.00040 [+0.00020, +0.00060]"
    sizes = [bytes_text(n) for n in (999, 2048, 5_898_240, 3 << 30)]
    assert sizes == ["999 B", "2.00 KiB", "5.62 MiB", "3.00 GiB"]
    assert describe(POLICIES["h2o + K4V4"]) == (
        "H2O-like: 4 sinks + 128 recent + best-scored, 700 slots, K4 V4 group 32, every 16 tokens"
    )
    assert describe(POLICIES["trial 31"]).endswith("budgets by layer sensitivity")


def test_sizes_say_what_memory_buys(tmp_path: Path) -> None:
    made = make_summary()
    h2o = made.row("h2o 240")
    mine = Curve("trial 31", ((h2o.bytes_peak // 4, 0.2), (h2o.bytes_peak // 2, 0.05)))
    its = Curve("h2o 240", ((h2o.bytes_peak, 0.1), (2 * h2o.bytes_peak, 0.05)))
    found = replace(made, curves=(mine, its))
    slots = h2o.slots16 / 4 * 2 ** (2 / 3)  # two thirds of the way down, in the logarithm of bytes
    assert sizes_text(found).endswith(
        f"trial 31 with about {round(slots, -1 if slots >= 100 else 0):.0f}"
    )
    low = replace(mine, points=((h2o.bytes_peak // 4, 0.09),))
    assert "with fewer than" in sizes_text(replace(found, curves=(low, its)))
    lost = replace(mine, points=((h2o.bytes_peak // 4, 0.3),))
    assert sizes_text(replace(found, curves=(lost, its))) == "" == sizes_text(made)
    write_report(found, tmp_path)
    text = (tmp_path / "report.html").read_text("utf-8")
    assert sizes_text(found)[1:] in text


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_narrow_terminal_gets_a_table_that_fits(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_summary()
    wide = closing(made, Path("run")).splitlines()
    monkeypatch.setattr("kvsearch.report.terminal.printed", lambda: width)
    monkeypatch.setattr("kvsearch.report.terminal.columns_of", lambda _: width)
    narrow = closing(made, Path("run")).splitlines()
    assert max(map(len, wide)) > width >= max(map(len, narrow + standing(made)))
    for row in made.rows:  # its loss is on the line of its name, and its interval from 60 on
        shown = f"{row.dnll_full.mean:+.4f}" if width < 60 else str(row.dnll_full)
        assert any(x[2:].startswith(row.name[:14]) and shown in x for x in narrow), row.name
    words = [" ".join(lines).replace("…", "").split() for lines in (wide, narrow)]
    lost = {w for w in words[0] if w not in words[1]}
    assert all(re.fullmatch(r"[-+\[\]0-9.,]+|PPL|fp16|slots|n|\(95|%\)", w) for w in lost), lost


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_progress_shows_its_count_and_its_time_at_every_width(width: int) -> None:
    """At 80 columns "12/16" was "12/…", and words of sentences were cut at the line's end."""
    shown, said = Shown(), "the language reference inside Python (technical English)"
    shown.console = Console(width=width, force_terminal=True, file=io.StringIO(), color_system=None)
    shown.say(said)
    with shown.step("losses", 16) as step:
        step.advance(12, "h2o+int4-fine")
    drawn = shown.console.file.getvalue()  # type: ignore[attr-defined]
    lines = re.sub(r"\x1b\[[0-9?]*[A-Za-z]", "", drawn).splitlines()
    assert set(said.split()) <= {w for line in lines for w in line.split()}
    assert "12/16" in lines[-1] and "0:00:00" in lines[-1] and len(lines[-1]) <= width
    assert ("h2o+int4-fine" in lines[-1]) == (width >= 100)


def test_the_recommendation_is_the_last_that_a_run_prints() -> None:
    made = make_summary()
    stopped = Interval(0.0342, 0.03, 0.04)
    rows = [replace(r, stopped=stopped) if r.name == "h2o 240" else r for r in made.rows]
    table_, *_, best, files = closing(replace(made, rows=rows), Path("run")).split("\n\n")
    assert best.startswith("Recommended for 256 fp16 slots per layer: trial 31 (")
    assert "of KV cache instead of" in best.splitlines()[1]
    assert files.startswith("report ") and "behind" not in table_.split("policy")[0]
    assert "by at least: h2o 240 0.030" in table_


def test_a_policy_that_reads_a_prompt_twice_says_so_and_names_the_best_that_does_not() -> None:
    made = make_summary()
    kvzip = Policy.model_validate(
        {"slots": 240, "rule": {"name": "reread"}, "trigger": "prompt", "sinks": 4}
    )
    assert "after the prompt, which is read twice" in describe(kvzip)
    rows = [replace(r, policy=kvzip) if r.name == "trial 31" else r for r in made.rows]
    again = replace(made, rows=rows)
    others = [r for r in rows if r.within_budget and r.kind != "full" and r.name != "trial 31"]
    best = min(others, key=lambda r: r.nll)
    said = f"read it once, {best.name} loses least: dNLL {best.dnll_full}."
    assert said in " ".join(closing(again, Path("run")).split()) and said in page(again)
    assert "twice" not in closing(made, Path("run")) + page(made)


def test_the_name_of_a_row_is_cut_only_where_nothing_else_helps() -> None:
    columns = [Column("policy", 20, left=True), Column("MiB", 8), Column("n", 6, drop=1)]
    rows = [["a-very-long-policy-name", "5.62", "1280"]]
    assert table(columns, rows, 30)[1].split() == ["a-very-long-policy-name", "5.62"]
    assert table(columns, rows, 20)[1].split() == ["a-very-lon…", "5.62"]
    assert table(columns, rows, None, ["over budget"])[1].endswith("1280  over budget")


def test_an_unfinished_run_does_not_call_its_search_text_the_report_text() -> None:
    made = make_summary()
    so_far = replace(asked(made, "text", report=made.text.search), open="The run has not ended.")
    for done, name in ((made, "report text"), (so_far, "wikitext2/search")):
        said = closing(done, Path("run"))
        assert f"n: tokens of {name};" in said
    assert "All policies on wikitext2/search<" in page(so_far)
    assert "All policies on the report text<" in page(made)
