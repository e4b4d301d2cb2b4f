"""The report of a hand-made summary: figures, wording and whole files."""

import csv
import errno
import io
import math
import os
import re
from dataclasses import replace
from html import escape
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from kvsearch.app.progress import Shown
from kvsearch.errors import RunError
from kvsearch.files import write_atomic
from kvsearch.pareto import front
from kvsearch.policy import Budgets, Ladder, ModelShape, Policy, Quantizer, Tier, layout
from kvsearch.records import Curve, Interval, Needles, Recheck, Row, Summary, Throughput, Trial
from kvsearch.report import write_report
from kvsearch.report.describe import describe
from kvsearch.report.html import Images, render
from kvsearch.report.labels import place
from kvsearch.report.pareto_figure import draw
from kvsearch.report.pareto_plot import Picture, picture
from kvsearch.report.screen import Column, table
from kvsearch.report.slotmap import AgeMap, SlotBars, slot_map
from kvsearch.report.tables import bytes_text, front_csv, interval_text, sizes_text, verdict
from kvsearch.report.terminal import closing, standing
from kvsearch.rules import Attention

SHAPE = ModelShape(layers=30, kv_heads=3, head_dim=64, heads=9)
CONTEXT, TOKENS, FULL_NLL = 2048, 14_336, 2.79
K4 = (Tier(key_bits=4, value_bits=4),)
SENSITIVE = Budgets(kind="sensitivity", weights=tuple(1.6 + math.sin(i) / 2 for i in range(30)))


def candidates() -> list[tuple[str, str, Policy, float]]:
    """Name, kind, policy and dNLL to the full cache on the report text."""
    fine = Quantizer(group=64, rotate=True, levels="lloyd", fp16_sinks=True)
    h2o, xmu = Attention(), Attention(alpha=1, beta=1, horizon=64)
    return [
        ("full", "full", Policy(), 0.0),
        ("window 256", "method", Policy(slots=256), 1.9),
        ("streaming-llm 256", "method", Policy(slots=256, sinks=4), 0.338),
        (
            "lacache 256",
            "method",
            Policy(
                slots=256,
                sinks=4,
                recent_window=30,
                ladder=Ladder(span=0.25, overlap=0.5),
                positions="cache",
            ),
            0.294,
        ),
        ("h2o 240", "method", Policy(slots=240, interval=16, recent_window=128, rule=h2o), 0.142),
        (
            "tova 256",
            "method",
            Policy(slots=256, rule=Attention(horizon=1, share="layer"), positions="cache"),
            0.171,
        ),
        (
            "xmu <60/40>",
            "method",
            Policy(
                interval=64,
                recent_window=1,
                rule=xmu,
                tiers=(
                    Tier(share=0.6, key_bits=4, value_bits=4),
                    Tier(share=0.4, key_bits=2, value_bits=2),
                ),
            ),
            1.26,
        ),
        (
            "streaming-llm + K4V4",
            "combined",
            Policy(slots=800, interval=16, sinks=4, tiers=K4),
            0.118,
        ),
        (
            "h2o + K4V4",
            "combined",
            Policy(
                slots=700,
                interval=16,
                sinks=4,
                recent_window=128,
                rule=h2o,
                tiers=K4,
                quantizer=Quantizer(group=32),
            ),
            0.067,
        ),
        (
            "h2o + K4V4 half",
            "combined",
            Policy(slots=380, interval=16, sinks=4, recent_window=128, rule=h2o, tiers=K4),
            0.109,
        ),
        (
            "trial 31",
            "searched",
            Policy(
                slots=690,
                interval=16,
                sinks=4,
                recent_window=128,
                rule=xmu,
                tiers=K4,
                quantizer=fine,
                budgets=SENSITIVE,
            ),
            0.041,
        ),
        (
            "trial 17",
            "searched",
            Policy(
                slots=420,
                interval=16,
                sinks=4,
                recent_window=128,
                rule=xmu,
                tiers=K4,
                quantizer=fine,
                budgets=SENSITIVE,
            ),
            0.066,
        ),
        (
            "trial 9",
            "searched",
            Policy(
                slots=400,
                interval=8,
                sinks=4,
                recent_window=64,
                tiers=K4,
                quantizer=fine,
                ladder=Ladder(span=0.5, overlap=0.2, order="contiguous"),
            ),
            0.187,
        ),
    ]


def make_summary(*, recommended: str | None = "trial 31", sure: bool = True) -> Summary:
    """A summary; `sure=False` widens every interval across zero."""
    found = candidates()
    peaks = {n: layout(p, SHAPE).bytes_peak(CONTEXT) for n, _, p, _ in found}
    budget = SHAPE.budget_bytes(256)
    kept = {found[i][0] for i in front([(peaks[n], d) for n, _, _, d in found])}
    rows = []
    for i, (name, kind, policy, d) in enumerate(found):
        half = (0.006 + 0.04 * d) if sure else 1.1 * d + 0.02
        limit = max(budget, peaks[name])
        loss, best = min(
            (e, n) for n, k, _, e in found if k == "method" and n != name and peaks[n] <= limit
        )
        wide = 0.011 if sure else abs(d - loss) + 0.01
        decode = (
            Throughput(
                412.7, 301.2, 1.37, 1.31, 1.42, 12, 4096, "NVIDIA H200", peaks[name], peaks["full"]
            )
            if i == 10
            else None
        )
        nll = FULL_NLL + d
        rows.append(
            Row(
                name=name,
                kind=kind,
                policy=policy,
                fingerprint=policy.fingerprint(),
                tokens=TOKENS,
                nll=nll,
                nll_se=0.031,
                blocks=8,
                ppl=math.exp(nll),
                dnll_full=Interval(d, d - half, d + half) if d else Interval(0.0, 0.0, 0.0),
                dnll_best=Interval(d - loss, d - loss - wide, d - loss + wide),
                best=best,
                search_dnll=d - 0.008 if kind == "searched" else None,
                bytes_peak=peaks[name],
                bytes_mean=0.93 * peaks[name],
                bytes_resident=peaks[name],
                slots16=peaks[name] / SHAPE.slot_bytes / SHAPE.layers,
                on_front=name in kept,
                within_budget=peaks[name] <= budget,
                seconds=41.5,
                decode=decode,
                impls={"attention": "sdpa"},
            )
        )
    rng = np.random.default_rng(0)
    states = ["complete"] * 33 + ["rejected"] * 3 + ["duplicate"] * 2 + ["failed", "pruned"]
    trials = []
    for i, state in enumerate(states):
        slots = int(90 * 2 ** rng.uniform(0, 3.6))
        policy = Policy(
            slots=slots + 40, interval=16, sinks=4, recent_window=16, rule=Attention(), tiers=K4
        )
        d = 25 / slots + rng.gamma(1.5, 0.12)
        done = state == "complete"
        trials.append(
            Trial(
                number=i,
                name=f"trial {i}",
                kind="combined" if i < 4 else "searched",
                state=state,
                policy=policy,
                fingerprint=policy.fingerprint(),
                nll=2.9 + d if done else None,
                dnll=d if done else None,
                bytes_peak=layout(policy, SHAPE).bytes_peak(CONTEXT) if done else None,
                seconds=11.0,
                error=None if done else "field slots: too few",
            )
        )
    checks = [
        Recheck(
            "sotu/report",
            "trial 31",
            "h2o + K4V4",
            Interval(-0.019, -0.031, -0.007) if sure else Interval(-0.01, -0.03, 0.01),
            8192,
        ),
        Recheck("sotu/report", "trial 31", "h2o 240", Interval(-0.07, -0.15, 0.004), 8192),
    ]
    return Summary(
        model={
            "name": "SmolLM2-135M-Instruct",
            "revision": "Q4_1",
            "digest": "9f2b7c41d0aa",
            "shape": {"layers": 30, "kv_heads": 3, "head_dim": 64, "heads": 9},
        },
        text={
            part: {"name": f"wikitext2/{part}", "tokens": n, "token_sha256": f"{n:x}4f3e42"}
            for part, n in (("search", 20_480), ("select", 16_384), ("report", 17_408))
        },
        settings={
            "budget_slots": 256,
            "context": CONTEXT,
            "report_windows": 8,
            "score_from": 256,
            "seed": 7,
            "space": "default",
            "versions": {"torch": "2.11.0"},
        },
        budget_bytes=budget,
        rows=sorted(rows, key=lambda r: r.nll),
        trials=trials,
        recommended=recommended,
        counts={s: states.count(s) for s in dict.fromkeys(states)},
        rechecks=checks,
        seconds=1912.0,
    )


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    summary = make_summary()
    return summary, folder, write_report(summary, folder, shape=SHAPE)


def page(summary: Summary) -> str:
    return render(summary, SHAPE, Images("wide", "narrow"), picture(summary, SHAPE))


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
        assert [float(cell[f"dnll_full{e}"]) for e in ("", "_lo", "_hi")] == [
            row.dnll_full.mean,
            row.dnll_full.lo,
            row.dnll_full.hi,
        ]
        assert cell["name"] == row.name and bool(int(cell["on_front"])) == row.on_front


def test_staircase_runs_through_the_rows_that_nothing_dominates():
    summary = make_summary()
    info = picture(summary, SHAPE)
    free = {
        (float(r.bytes_peak), r.dnll_full.mean)
        for r in summary.rows
        if not any(
            o.bytes_peak <= r.bytes_peak and o.nll <= r.nll and o is not r for o in summary.rows
        )
    }
    assert free < set(info.stairs)
    for (xa, ya), (xb, yb) in zip(info.stairs, info.stairs[1:], strict=False):
        assert (xb > xa and yb == ya) or (xb == xa and yb < ya)
    assert len(info.trials) == 33
    assert {p.name for p in info.beyond} == {"window 256", "xmu <60/40>"}


def test_every_row_at_the_budget_is_compared_by_name():
    """One column of marks at the budget cannot be read; the sorted rows beside it can."""
    summary = make_summary()
    info = picture(summary, SHAPE)
    rows = info.at_budget()
    asked = [
        r for r in summary.rows
        if 0.9 * summary.budget_bytes <= r.bytes_peak <= summary.budget_bytes
        or r.name == summary.recommended
    ]  # fmt: skip
    assert [p.name for p in rows] == [r.name for r in sorted(asked, key=lambda r: r.dnll_full.mean)]
    assert len(rows) > 5
    beside, *_ = draw(info).axes
    assert [label.get_text() for label in beside.get_yticklabels()] == [p.name for p in rows]
    links = [line.get_url() for line in beside.lines if line.get_url()]
    assert links == [f"#{p.anchor}" for p in rows]


def test_a_row_that_was_stopped_is_drawn_from_where_it_is_at_least():
    summary = make_summary()
    best = summary.row("trial 31").dnll_full.mean
    at_budget = {p.name for p in picture(summary, SHAPE).at_budget()}
    last = max((r for r in summary.rows if r.name in at_budget), key=lambda r: r.dnll_full.mean)
    far = replace(last, stopped=Interval(0.03, 0.02, 0.04))
    rows = [far if r is last else r for r in summary.rows]
    info = picture(replace(summary, rows=rows), SHAPE)
    (drawn,) = (p for p in info.points if p.name == far.name)
    assert (drawn.lo, drawn.y, drawn.hi) == (best + 0.02, far.dnll_full.mean, far.dnll_full.mean)
    assert any("at least 0.020 behind" in line for line in drawn.details)
    assert "at least" in info.note and not picture(summary, SHAPE).note


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
    assert [bytes_text(n) for n in (999, 2048, 5_898_240, 3 << 30)] == [
        "999 B",
        "2.00 KiB",
        "5.62 MiB",
        "3.00 GiB",
    ]
    policies = {name: policy for name, _, policy, _ in candidates()}
    assert describe(policies["h2o + K4V4"]) == (
        "H2O-like: 4 sinks + 128 recent + best-scored, 700 slots, K4 V4 group 32, every 16 tokens"
    )
    assert describe(policies["trial 31"]).endswith("budgets by layer sensitivity")


def test_slot_map_shows_tiers_and_shares():
    policies = {name: policy for name, _, policy, _ in candidates()}
    ages = slot_map(policies["trial 9"], SHAPE, CONTEXT)
    assert isinstance(ages, AgeMap) and ages.legend == {1: "16 bit", 2: "K4 V4"}
    assert (ages.codes[:, :4] == 1).all() and (ages.codes[:, -7:] == 1).all()
    limits = [layer.slots for layer in layout(policies["trial 9"], SHAPE).layers]
    assert ((ages.codes > 0).sum(axis=1) <= limits).all()
    bars = slot_map(policies["trial 31"], SHAPE, CONTEXT)
    assert isinstance(bars, SlotBars)
    limits = [layer.slots for layer in layout(policies["trial 31"], SHAPE).layers]
    assert [sum(s.count for s in bar) for bar in bars.layers] == limits
    assert [s.role for s in bars.layers[0]] == [
        "sinks",
        "chosen by rank",
        "recent window",
        "newest",
    ]


def test_labels_keep_apart_and_inside():
    rng = np.random.default_rng(3)
    anchors = [tuple(p) for p in rng.uniform(100, 500, (25, 2))]
    marks = [(x - 4, y - 4, x + 4, y + 4) for x, y in anchors]
    boxes = [b for b in place(anchors, [(60, 10)] * 25, marks, (0, 0, 600, 600), 8) if b]
    assert len(boxes) >= 20
    for i, a in enumerate(boxes):
        assert min(a) >= 0 and max(a) <= 600
        for b in boxes[:i] + marks:
            assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]


def test_names_at_the_budget_are_in_the_comparison_alone():
    """Three policies of one size had their names written over each other."""
    info = picture(make_summary(), SHAPE)
    best = next(p for p in info.points if p.recommended)
    twins = [replace(best, name=f"earlier-{i}", recommended=False) for i in range(3)]
    plain = replace(best, x=best.x / 2, name="smaller", recommended=False, on_front=True)
    alike = [replace(plain, name=f"as small {i}") for i in range(12)]
    crowded = replace(info, points=(*info.points, *twins, plain, *alike))
    _, *panels = draw(crowded).axes
    said = [text.get_text() for axes in panels for text in axes.texts]
    assert best.name in said and "smaller" in said
    assert not set(said) & {p.name for p in twins}


def overlaps(info: Picture, narrow: bool, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Texts of a picture that touch another text, or leave the picture."""
    from matplotlib.text import Text

    figure, drawn, plain = draw(info, narrow=narrow), dict[Text, None](), Text.draw
    monkeypatch.setattr(Text, "draw", lambda t, r: (drawn.update({t: None}), plain(t, r)))
    figure.canvas.draw()
    width, height = figure.canvas.get_width_height()
    found = [(t.get_text(), t.get_window_extent()) for t in drawn if t.get_text()]
    bad = [f"{s!r} leaves" for s, e in found
           if e.x0 < -1 or e.y0 < -1 or e.x1 > width + 1 or e.y1 > height + 1]  # fmt: skip
    for i, (said, a) in enumerate(found):
        for other, b in found[:i]:
            apart = max(a.x0 - b.x1, b.x0 - a.x1, a.y0 - b.y1, b.y0 - a.y1)
            bad += [f"{said!r} touches {other!r}"] if apart < -2 else []
    return bad


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("case", ["many", "one", "long", "far"])
def test_texts_of_a_picture_do_not_touch(
    case: str, narrow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_summary()
    if case == "one":
        made = replace(made, rows=[made.row("trial 31")], trials=[])
    elif case == "long":
        made.rows[1] = replace(made.rows[1], name="a-policy-file-with-a-name-of-its-own-" * 2)
        made = replace(made, recommended=made.rows[1].name)
        made.text["report"]["name"] = "corpus/of/our/own/documents-2026-11.jsonl:0-900000" * 3
    elif case == "far":
        made = replace(made, budget_bytes=8 * made.budget_bytes)
    info = picture(made, SHAPE)
    assert not overlaps(info, narrow, monkeypatch)
    panels = len(draw(info, narrow=narrow).axes)
    assert panels == (2 if case == "one" else 3)


def test_bars_are_cut_and_marked_where_they_leave_the_axes() -> None:
    info = picture(make_summary(), SHAPE)
    low, high = info.y_range
    points = tuple(replace(p, lo=p.lo - 1, hi=p.hi + 1) for p in info.points)
    info = replace(info, points=points)
    wide = [p for p in info.at_budget() if p.y < high]
    assert len(wide) > 3
    beside, *_ = draw(info).axes
    for p in wide:
        row = info.at_budget().index(p)
        mine = [line for line in beside.lines if list(line.get_ydata())[:1] == [row]]
        marks = {line.get_marker(): line.get_xdata()[0] for line in mine}
        assert marks["<"] == low and marks[">"] == high
        assert all(low <= x <= high for line in mine for x in line.get_xdata())


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file_and_no_crumbs(tmp_path, monkeypatch, code, call):
    target = write_atomic(tmp_path / "new" / "front.csv", "old")

    def fail(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(RunError, match=r"^cannot write .*front\.csv: the disk is "):
        write_atomic(target, b"a half-written " * 1000)
    assert [p.name for p in target.parent.iterdir()] == ["front.csv"]
    assert target.read_text() == "old"


def test_sizes_and_facts_say_what_memory_buys(tmp_path: Path) -> None:
    made = make_summary()
    h2o = made.row("h2o 240")
    mine = Curve("trial 31", ((h2o.bytes_peak // 4, 0.2), (h2o.bytes_peak // 2, 0.05)))
    its = Curve("h2o 240", ((h2o.bytes_peak, 0.1), (2 * h2o.bytes_peak, 0.05)))
    found = replace(made, curves=(mine, its), needles=Needles(1472, 8, {"full": 8, "h2o 240": 0}))
    slots = h2o.slots16 / 4 * 2 ** (2 / 3)  # two thirds of the way down, in the logarithm of bytes
    assert sizes_text(found).endswith(
        f"trial 31 with about {round(slots, -1 if slots >= 100 else 0):.0f}"
    )
    low = replace(mine, points=((h2o.bytes_peak // 4, 0.09),))
    assert "with fewer than" in sizes_text(replace(found, curves=(low, its)))
    lost = replace(mine, points=((h2o.bytes_peak // 4, 0.3),))
    assert sizes_text(replace(found, curves=(lost, its))) == "" == sizes_text(made)
    write_report(found, tmp_path, shape=SHAPE)
    text = (tmp_path / "report.html").read_text("utf-8")
    assert "answered exactly: the full cache 8, h2o 240 0" in text and sizes_text(found)[1:] in text


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


def test_the_name_of_a_row_is_cut_only_where_nothing_else_helps() -> None:
    columns = [Column("policy", 20, left=True), Column("MiB", 8), Column("n", 6, drop=1)]
    rows = [["a-very-long-policy-name", "5.62", "1280"]]
    assert table(columns, rows, 30)[1].split() == ["a-very-long-policy-name", "5.62"]
    assert table(columns, rows, 20)[1].split() == ["a-very-lon…", "5.62"]
    assert table(columns, rows, None, ["over budget"])[1].endswith("1280  over budget")


def test_an_unfinished_run_does_not_call_its_search_text_the_report_text() -> None:
    made = make_summary()
    part = {**made.text, "report": made.text["search"]}
    so_far = replace(made, open="The run has not ended.", text=part)
    for done, name in ((made, "report text"), (so_far, "wikitext2/search")):
        said = closing(done, Path("run"))
        assert f"n: tokens of {name};" in said
    assert "All policies on wikitext2/search<" in page(so_far)
    assert "All policies on the report text<" in page(made)
