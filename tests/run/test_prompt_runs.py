"""A search on prompts: disjoint parts, shares of the context, the gate, the report."""

import csv
import json
import math
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import kvsearch
from kvsearch.commands.export import export
from kvsearch.commands.run import search
from kvsearch.errors import KvsearchError
from kvsearch.evaluation.evaluator import Evaluator
from kvsearch.models.load import load_model
from kvsearch.options.run_config import RunConfig
from kvsearch.report.needles import draw_needles, needle_map
from kvsearch.results.folder import RunFolder
from kvsearch.results.intervals import common, mcnemar
from kvsearch.session.context_worth import Worth
from kvsearch.session.make_windows import text
from kvsearch.workloads import Ask, Item, Prompts
from kvsearch.workloads.items import ids
from kvsearch.workloads.measured_parts import divided, in_turn
from kvsearch.workloads.prompts.encode import items_of
from kvsearch.workloads.prompts.files import read
from tests.command import call

FAST: dict[str, Any] = dict(
    trials=2, items=3, budget_slots=96, bench=False, space="h2o-int4", portfolio="none",
    exclude_method=("xmu", "xmu-evict", "h2o+k4v2", "h2o+int4-fine", "lacache", "pyramidkv"),
)  # fmt: skip
# beside a text windows say how many contexts there are
TEXT = {name: value for name, value in FAST.items() if name != "items"}


@pytest.fixture(scope="module")
def sharp(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with larger weights: its answers depend on the context."""
    folder = tmp_path_factory.mktemp("sharp")
    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(6)
    model.save_pretrained(folder)
    for file in tiny_folder.glob("*token*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def prompts(file: Path, count: int = 14) -> Path:
    """So many documents with two questions each, without answers."""
    rng = random.Random(0)
    rows = [
        {"context": " ".join(rng.choices("red blue tall old river stone".split(), k=40)) + f" {i}.",
         "questions": ["Which one? ", "And where was it? "]}
        for i in range(count)
    ]  # fmt: skip
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def with_depths(*given: Any) -> Prompts:
    """Items as of a task that hides facts at known depths."""
    made = items_of(*given)
    items = tuple(replace(x, depth=(0.1, 0.9)[i % 2]) for i, x in enumerate(made.items))
    return Prompts(made.name, items, made.see)


def said(**how: Any) -> str:
    with pytest.raises(KvsearchError) as caught:
        search(**how)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_documents_are_in_one_part_only(tmp_path: Path) -> None:
    records = read(prompts(tmp_path / "mine.jsonl", 40))
    parts = divided("mine.jsonl", records)
    documents = [{r.context for r in some} for some in parts.values()]
    assert sum(map(len, documents)) == len(set.union(*documents)) == 40
    assert [len(d) for d in documents] == [20, 6, 14]
    again = divided("mine.jsonl", records[::-1])
    assert {k: {r.context for r in v} for k, v in again.items()} == dict(
        zip(parts, documents, strict=True)
    )


def test_a_report_of_another_file_shares_no_document(tmp_path: Path) -> None:
    mine, other = prompts(tmp_path / "mine.jsonl", 12), prompts(tmp_path / "other.jsonl", 14)
    how = {"prompts": mine, "report_prompts": other, **FAST}
    both = said(**how)
    assert "other.jsonl and mine.jsonl have 12 documents in common, such as that of" in both
    assert "once for each --prompts" in said(**how | {"prompts": [mine, other]})
    assert "give both" in said(**how | {"prompts": (), "tasks": "needle"})
    lines = other.read_text().splitlines(keepends=True)
    other.write_text("".join(lines[12:]))
    parts = divided("mine", read(mine), read(other), "other")
    assert [len(p) for p in parts.values()] == [8, 4, 2]


def test_a_budget_that_holds_every_prompt_is_refused_before_anything_is_measured(
    sharp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After minutes of the full cache's answers it was told about windows and --context."""
    monkeypatch.setattr(
        "kvsearch.session.context_worth.context_worth", lambda *_: pytest.fail("measured")
    )
    how = {"prompts": prompts(tmp_path / "mine.jsonl"), "model": str(sharp), "out": tmp_path / "r"}
    told = said(**FAST | how | {"budget_slots": 4096.0, "progress": False})
    assert re.search(r"the longest prompt, of \d+ tokens with its answer, never exceeds", told)
    assert "--context" not in told


def test_the_mean_over_items_is_the_weighted_mean_of_shares() -> None:
    def made(name: str, count: int) -> Prompts:
        item = Item(name, name, ids([1, 2]), (Ask(ids([3]), ids([4])),))
        return Prompts(name, (item,) * count)

    part = in_turn("search", [made("a", 5), made("b", 4)], {"a": 2.0, "b": 0.5}, {"a": 3.0, "b": 1})
    assert part.of == ("a", "b") * 4
    nats = np.array([0.5 if name == "a" else 0.1 for name in part.of])
    assert (nats * part.scales).mean() == pytest.approx(0.75 * 0.5 / 2.0 + 0.25 * 0.1 / 0.5)
    assert part.cut(2, 3).of == ("a", "b", "a") and len(part.cut(6, 9)) == 2


def test_a_run_on_prompts_ends_in_a_report_and_goes_on(
    sharp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvsearch.session.make_workloads.items_of", with_depths)
    file, out = prompts(tmp_path / "mine.jsonl"), tmp_path / "run"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:10]))
    (own := tmp_path / "report.jsonl").write_text("".join(lines[10:]))
    how = {**FAST, "items": 4, "prompts": file, "report_prompts": own, "see": "aware", "out": out}
    s = search(str(sharp), **how).summary
    assert s.text.report.name == "report.jsonl"
    assert s.settings.see == "aware" and not s.settings.windowed and s.recommended is not None
    full = s.row("full")
    assert full.exact is not None and full.exact.mean == 1.0  # its own answers are the reference
    prompted = {*s.behind, *(r.name for r in s.rows if r.policy.trigger == "prompt")}
    assert {"snapkv-prompt", "pyramidkv-prompt"} <= prompted
    most = max(r.windows for r in s.rows)
    for row in s.rows:
        (kept,) = row.workloads
        assert kept.workload == "mine.jsonl" and kept.asks == 2 * row.windows
        if row.windows == most:  # other rows are placed through the recommended one
            assert kept.lost.mean == pytest.approx(row.dnll_full.mean, abs=1e-5)
        assert row.bytes_resident <= row.bytes_peak and (row.name == "full" or row.within_budget)
    best, rival = s.row(s.recommended), s.against("method")
    assert rival is not None and {c.name for c in s.curves} == {best.name, rival.against}
    assert full.workloads[0].kl == 0.0 and best.discordant is None
    for row in (r for r in s.rows if r is not best):
        assert row.workloads[0].kl is not None and row.workloads[0].kl >= 0
        d, asks = row.discordant, row.workloads[0].asks
        alone = [1] * d.only_row + [-1] * d.only_recommended if d is not None else []
        assert d is not None and d.p >= mcnemar(alone)  # documents have two asks
        assert row is full or (row.workloads[0].kl > 0 and d.only_row + d.only_recommended <= asks)
        assert {n.depth for n in row.needles} <= {0.1, 0.9} and len(row.needles) == row.windows
    assert full.discordant is not None and full.discordant.only_recommended == 0
    found_facts = needle_map(s)
    assert found_facts is not None and found_facts.panels[0].name == "full"
    assert (found_facts.panels[0].asked == found_facts.panels[0].exact).all()
    assert found_facts.panels[0].asked[0, 1:4].sum() == 0  # no fact is in the middle
    pictures = {draw_needles(found_facts, narrow=narrow) for narrow in (True, False)}
    assert len(pictures) == 2 and all(x.startswith(b"\x89PNG") for x in pictures)
    assert "Which facts it finds" in (out / "report.html").read_text()
    assert len(s.examples) == 4 and "What it answers" in (out / "report.html").read_text()
    for example in s.examples:  # the reference is what the full cache says, to an end token
        assert [*example.answers] == ["full", s.recommended, rival.against]
        mine, reference = example.answers["full"].strip(), example.reference
        assert mine.startswith(reference) or reference.startswith(mine)
    rows = list(csv.DictReader((out / "front.csv").open()))
    columns = {f"{name}[mine.jsonl]" for name in ("lost", "flips", "kl")}
    assert {"exact", "mcnemar_p", *columns} <= rows[0].keys()
    page = re.sub('base64,[^"]*', "", (out / "report.html").read_text())
    assert "context lost" in page and "question-aware" in page and "PPL" not in page
    before = (out / "trials.jsonl").read_bytes()
    again = search(str(sharp), **how | {"trials": 3})
    assert (out / "trials.jsonl").read_bytes().startswith(before) and again.summary.resumed
    row = next(r for r in s.rows if r.windows == most and r.name != "full")
    eval_ = kvsearch.evaluate(row.policy, str(sharp), prompts=[own], see="aware").rows[0]
    assert most == 4 and eval_.exact == row.exact
    assert eval_.flips == pytest.approx(row.workloads[0].flips)
    assert eval_.lost.mean == pytest.approx(row.workloads[0].lost.mean, abs=1e-4)


@pytest.mark.parametrize("target", ["openvino", pytest.param("kvpress", marks=pytest.mark.slow)])
def test_a_runtime_that_evicts_after_a_prompt_is_searched_for(
    target: str, sharp: Path, tmp_path: Path
) -> None:
    """What is found exports as it is, and the export says what its answers lose."""
    file, out = prompts(tmp_path / "mine.jsonl"), tmp_path / "run"
    how = {**FAST, "trials": 1, "budget_slots": 176, "space": "default"}
    found = search(str(sharp), prompts=file, out=out, target=target, **how).summary
    evicting = [r for r in found.rows if r.policy.evicts]
    assert len(evicting) >= (3 if target == "openvino" else 4)
    for row in evicting:
        assert row.within_budget and row.policy.trigger.startswith("prompt")
        assert target == "kvpress" or row.policy.slots % 32 == 0
    done = export(
        out / "best.json", target, tmp_path / "files", strict=True, prompts=[file], items=3,
    )  # fmt: skip
    assert done.answers is not None and [r.policy for r in done.answers.rows] == ["asked"]
    assert done.answers.rows[0].bytes_peak <= found.budget_bytes
    done = export(
        "h2o", target, tmp_path / "h2o", prompts=[file], model=str(sharp), budget_slots=90
    )
    assert done.answers is not None
    assert [r.policy for r in done.answers.rows] == ["asked", "given"]
    with pytest.raises(KvsearchError, match="--verify compares on a text"):
        export("h2o", "transformers", tmp_path / "no", prompts=[file], budget_slots=90, verify=True)


def test_what_cannot_be_searched_is_one_sentence(
    tiny_folder: Path, sharp: Path, tmp_path: Path, capsys: Any
) -> None:
    file = prompts(tmp_path / "mine.jsonl")
    flat = said(model=str(tiny_folder), prompts=file, out=tmp_path / "a", **FAST)
    assert "answers none of these prompts from its context" in flat
    few = prompts(tmp_path / "few.jsonl", 5)
    assert "has 5 documents" in said(model=str(sharp), prompts=few, out=tmp_path / "a", **FAST)
    text = said(prompts=file, report_text=str(file), **FAST)
    assert text == "--report-text is for a search on a text, not on prompts; give --text as well"
    both = said(prompts=file, text=str(file), **FAST)
    assert both.startswith("--items is for prompts alone; beside a text --windows")
    assert "unknown task" in said(tasks="nedle", **FAST)
    assert "--see must be one of" in said(tasks="needle", see="both", **FAST)
    assert "characters) is no file of prompts" in said(prompts="A cat sat. " * 900, **FAST)
    code, _, err = call(["run", "--task", "needle:2,weight=0"], capsys)
    assert code == 2 and "weight must be" in err
    assert not (tmp_path / "a").exists()


@pytest.mark.slow
def test_several_processes_measure_what_one_does(sharp: Path, tmp_path: Path) -> None:
    """Parts are pickled, and records of a few contexts each are put together."""
    file = prompts(tmp_path / "mine.jsonl", 30)
    how = {**FAST, "items": 5, "trials": 1}
    found = {
        n: search(str(sharp), prompts=file, out=tmp_path / f"run{n}", workers=n, **how).summary
        for n in (0, 2)
    }
    one, two = ({r.name: r for r in s.rows} for s in found.values())
    folders = [RunFolder(tmp_path / f"run{n}", write=False) for n in found]
    same = {n: r for n, r in one.items() if n in two and two[n].windows == r.windows}
    assert len(same) >= len(one) / 2  # who is certainly behind rests on the search part, too
    for name, row in same.items():
        assert two[name].exact == row.exact
        # means are over the contexts of the recommended policy, which may have more in one of them
        mine, its = common(*(x.losses("report", row.fingerprint, 0) for x in folders))
        assert mine.sums == pytest.approx(its.sums, abs=1e-4)
        assert two[name].workloads[0].flips == pytest.approx(row.workloads[0].flips)


def test_a_text_and_prompts_are_one_search(
    sharp: Path, prose: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvsearch.session.make_workloads.rise_of", lambda *_: Worth(3.0, 5.0, True))
    file = prompts(tmp_path / "mine.jsonl", 24)
    how = TEXT | {"trials": 1, "prompts": file, "text": str(prose), "context": 256, "windows": 2}
    how["batch"] = 1  # so that rows are judged after the first window and prompts
    s = search(str(sharp), **how, weight="text=3", out=tmp_path / "run").summary
    assert s.settings.windowed and s.settings.workloads == {"text": 3.0, "mine.jsonl": 1.0}
    windows = text(load_model(str(sharp)), RunConfig(**how), lambda _: None).parts["report"]
    evaluator, most = Evaluator(load_model(str(sharp))), max(r.windows for r in s.rows)
    nll = {}
    for row in s.rows:
        assert row.text is not None and row.text.dnll is not None
        (asked,) = row.asked
        assert asked.workload == "mine.jsonl" and asked.asks == row.windows
        assert row.text.lost.mean == pytest.approx(row.text.dnll.mean / 2, abs=1e-5)
        if row.windows == most:
            mean = 0.75 * row.text.lost.mean + 0.25 * asked.lost.mean
            assert row.dnll_full.mean == pytest.approx(mean, abs=1e-5)
        if row.name in ("full", s.recommended):  # as an evaluation of the text alone has it
            few = windows.beginnings[: row.windows // 2]
            nll[row.name] = evaluator.quality(row.policy, few).nll[:, 95:].mean()
            assert row.text.ppl == pytest.approx(math.exp(nll[row.name]), rel=1e-4)
    best = s.row(s.recommended or "")
    assert best.policy.trigger == "stream" and best.within_budget  # of a text, too
    page = (tmp_path / "run" / "report.html").read_text()
    assert "windows and contexts of up to" in page and "over the full cache" in page
    head, *lines = (tmp_path / "run" / "front.csv").read_text().splitlines()
    assert {"ppl[text]", "dnll[text]", "lost[text]", "exact[mine.jsonl]"} <= {*head.split(",")}
    assert len(lines) == len(s.rows)


@pytest.mark.parametrize(
    ("weight", "part"),
    [
        (("text",), "is not NAME=W with a number of at least 0, such as text=2"),
        (("text=-1",), "is not NAME=W"),
        (("text=0", "facts=0"), "every --weight is 0"),
        (("texts=2",), "there is no workload of that name"),
        (("facts=2",), "there is no workload of that name; known are needle, text"),
        (("needle=0",), "measures nothing; leave needle out"),
    ],
)
def test_weights_that_cannot_be_are_one_sentence(
    prose: Path, weight: tuple[str, ...], part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvsearch.session.load.load_model", None)  # nothing gets that far
    tasks = ("needle",) if "needle=0" in weight or "facts=2" in weight else ()
    how = {"text": str(prose), "context": 256, "weight": weight, "tasks": tasks}
    assert part in said(**TEXT | how)


@pytest.mark.parametrize(
    ("context", "part"), [(256, "has no room for them"), (512, "does not need it")]
)
def test_facts_that_a_model_cannot_find_leave_the_text_alone(
    context: int, part: str, tiny_folder: Path, prose: Path, tmp_path: Path
) -> None:
    how: dict[str, Any] = TEXT | {
        "trials": 0, "text": str(prose), "context": context, "windows": 1, "report_windows": 1,
    }  # fmt: skip
    both = search(str(tiny_folder), **how, out=tmp_path / "a")
    alone = search(str(tiny_folder), **how, text_only=True, out=tmp_path / "b")
    assert both.summary.settings.see is None
    why = both.summary.settings.left_out["facts"]
    assert part in why
    assert [r.nll for r in both.summary.rows] == [r.nll for r in alone.summary.rows]
    assert f"Not measured. facts: {why}." in both.report().read_text()
