"""Records of a run: nothing is dropped from tables, and older files are read by today's names."""

import json
import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kvsearch.errors import RunError
from kvsearch.policy import Policy
from kvsearch.report.tables import front_csv
from kvsearch.results import run_files
from kvsearch.results.attempts import Attempts
from kvsearch.results.folder import RunFolder
from kvsearch.results.measurement import Answered, Measurement
from kvsearch.results.records import Interval, Kept, Row, Trial, columns
from kvsearch.run import summarise
from tests.command import call

RUN = Path(__file__).resolve().parents[2] / "studies/2026-11-first-command/records/wikitext-3"
TRIAL = Trial(3, "trial 3", "searched", "pruned", Policy(slots=9), "ab")


def test_a_table_of_trials_has_every_field() -> None:
    found = columns(Trial, [TRIAL])
    assert list(found) == [f.name for f in fields(Trial)]
    assert '"slots": 9' in found["policy"][0]


def row(speed: float | None) -> Row:
    return Row(
        name="a", kind="searched", policy=Policy(slots=9), fingerprint="ab", tokens=64, nll=1.0,
        nll_se=0.1, blocks=4, ppl=2.7, dnll_full=Interval(0.1, 0.0, 0.2), dnll_best=None, best=None,
        search_dnll=0.1, bytes_peak=100, bytes_mean=90.0, bytes_resident=80, slots16=9.0,
        on_front=True, within_budget=True, seconds=1.0, speed=speed,
    )  # fmt: skip


def test_front_csv_has_every_field_of_a_row() -> None:
    behind = replace(row(0.7), stopped=Interval(0.2, 0.1, 0.3))
    kept = Kept("qa", Interval(0.1, 0.0, 0.2), Interval(0.5, 0.3, 0.7), 0.1, 20)
    behind = replace(behind, exact=Interval(0.5, 0.3, 0.7), workloads=(kept,))
    head = front_csv([behind]).splitlines()[0].split(",")
    named = {
        "workloads": "lost[qa]_lo",
        "policy": "description",
        "dnll_full": "dnll_full_lo",
        "decode": "decode_ratio",
        "discordant": "mcnemar_p",
    }
    assert {named.get(f.name, f.name) for f in fields(Row)} <= set(head)
    plain_head = front_csv([row(None)]).splitlines()[0].split(",")
    assert not {"speed", "stopped", "exact"} & {*plain_head}


def test_files_of_other_versions_are_refused(tmp_path: Path) -> None:
    for word in ("kvsearch.run/9", "kvsearch.run/2", 3):
        (tmp_path / "measured.json").write_text(json.dumps({"schema": word}))
        with pytest.raises(RunError, match="this kvsearch reads"):
            run_files.measured(tmp_path / "measured.json")


def test_attempts_survive_the_process_and_torn_lines(tmp_path) -> None:
    file = tmp_path / "attempts.jsonl"
    first = Attempts(file)
    assert [first.begin("report", "ab"), first.begin("report", "ab")] == [1, 2]
    first.begin("search", "ab")
    first.release("search", "ab")
    with file.open("a") as f:
        f.write('{"part": "rep')
    second = Attempts(file)
    assert (second.of("report", "ab"), second.of("search", "ab")) == (2, 0)
    second.end("report", "ab")  # its line is joined to the torn one
    assert second.of("report", "ab") == 0 and second.begin("report", "cd") == 1
    assert Attempts(file).of("report", "cd") == 1


WRONG = [
    ("study.json", None, "", "is damaged: not JSON"),
    ("study.json", None, "[" * 100_000, "nested too deeply"),
    ("study.json", None, "[]", "it holds no object"),
    ("study.json", ("settings",), {}, "field settings.budget_slots: is missing"),
    ("study.json", ("settings", "context"), "x", "field settings.context"),
    ("study.json", ("model", "shape", "kv_heads"), 0, "field model.shape.kv_heads"),
    ("study.json", ("model", "shape"), None, "field model.shape: expected an object"),
    ("study.json", ("settings", "engine"), "tuna", "cannot read: unknown engine 'tuna'"),
    ("study.json", ("options",), {"trails": 3}, "no option 'trails'; did you mean 'trials'"),
    ("study.json", ("options",), {"windows": "x"}, "--windows must be at least 1, got 'x'"),
    ("study.json", ("options",), {"text": 3}, "a text is a path"),
    (
        "study.json",
        ("settings", "exclude_method"),
        3,
        "exclude_method: Input should be a valid list",
    ),
    ("measured.json", ("rows",), [], "not one row of each name"),
    ("measured.json", ("rows", 1, "policy"), 3, "field rows.1.policy: expected an object"),
    ("measured.json", ("rows", 1, "policy"), {"slotz": 3}, "policy.slotz: there is no such field"),
    ("measured.json", ("rows", 1, "fingerprint"), "../x", "field rows.1.fingerprint"),
    ("measured.json", ("rows", 1, "seconds"), None, "field rows.1.seconds"),
    ("measured.json", ("recommended",), "nobody", "there is no row 'nobody'"),
    ("trials.jsonl", None, '{"number": 1}\n', "line 1 is damaged"),
    ("trials.jsonl", ("params",), 3, "line 1 is damaged"),
    ("trials.jsonl", ("name",), 3, "line 1 is damaged (field name"),
    ("trials.jsonl", ("state",), "lost", "line 1 is damaged (field state"),
    ("blocks.parquet", None, "PAR1", "cannot read"),
    ("importances.json", None, '{"sinks": "x"}', "field sinks: Input should be a valid number"),
]


@pytest.mark.parametrize(("name", "place", "value", "said"), WRONG)
def test_a_damaged_run_is_one_sentence_and_nothing_is_written(
    name: str, place: tuple[Any, ...] | None, value: Any, said: str, tmp_path: Path, capsys: Any
) -> None:
    run = shutil.copytree(RUN, tmp_path / "run")
    file = run / name
    if place is None:
        file.write_text(value)
    else:
        text = file.read_text()  # of a journal, the first line
        inner = data = json.loads(text if file.suffix == ".json" else text.splitlines()[0])
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = value
        file.write_text(json.dumps(data) + "\n")
    before = {f.name: f.read_bytes() for f in run.rglob("*") if f.is_file()}
    code, out, err = call(["report", str(run), "--json"], capsys)
    assert code == 2 and out == "" and err.count("\n") == 1 and len(err) < 700
    assert said in err and name in err
    after = {f.name: f.read_bytes() for f in run.rglob("*") if f.is_file() and f.name != ".lock"}
    assert after == before


def test_a_folder_without_a_run_stays_as_it_is(tmp_path: Path, capsys: Any) -> None:
    for argv in (["report", str(tmp_path)], ["export", str(tmp_path), "--to", "optuna"]):
        code, _, err = call(argv, capsys)
        assert code == 2 and " no run" in err and err.count("\n") == 1
        assert not list(tmp_path.iterdir())


def test_losses_that_do_not_belong_together_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "nll").mkdir()
    folder = RunFolder(tmp_path, write=False)
    folder.save_nll("report", "ab", Measurement(np.ones((2, 9), np.float32)))
    file = tmp_path / "nll" / "report-ab.parquet"
    whole = pq.read_table(file)
    for table in (
        whole.slice(0, 0), whole.slice(0, 13), whole.drop(["nll"]),
        whole.replace_schema_metadata({}), pa.table({"window": ["x"], "nll": ["y"]}),
    ):  # fmt: skip
        pq.write_table(table, file)
        with pytest.raises(RunError, match=r"cannot read .*report-ab\.parquet") as error:
            folder.load_nll("report", "ab")
        assert "\n" not in str(error.value)
    run = shutil.copytree(RUN, tmp_path / "run")
    found = json.loads((run / "measured.json").read_text())["rows"][1]["fingerprint"]
    (run / "nll").mkdir()
    ones = Measurement(np.ones((1, 700), np.float32))
    RunFolder(run, write=False).save_nll("report", found, ones)
    with pytest.raises(RunError, match="are of other windows than those of full"):
        summarise.read(RunFolder(run, write=False))


def test_what_was_measured_comes_back_from_its_file_and_pieces_make_one(tmp_path: Path) -> None:
    (tmp_path / "nll").mkdir()
    folder, nll = RunFolder(tmp_path, write=False), np.ones((1, 1), np.float32)
    answered = [Answered("qa", "one", 0.5, [True, False], [[3, 4], [5]], kl, needle=(640, 0.5))
                for kl in ([0.25, 0.5], None)]  # fmt: skip
    pieces = [Measurement(nll, 5, 7, 1.5, {"attention": "sdpa"}, (a,)) for a in answered]
    for first, piece in enumerate(pieces):
        folder.save_nll(f"report.{first}", "ab", piece, "h2o")
    found = Measurement.joined([folder.load_nll(f"report.{i}", "ab") for i in range(2)])
    assert found.nll.shape == (2, 1) and found.answers == tuple(answered)
    assert (found.tokens, found.bytes_resident, found.seconds) == (10, 7, 3.0)
    assert found.impls == pieces[0].impls
    table = pq.read_table(tmp_path / "nll" / "report.0-ab.parquet")
    assert [a["exact"] for a in table["answer"].to_pylist()] == [[True, False]]
    assert b"qa" not in table.schema.metadata[b"about"]


def test_an_interval_around_nothing_has_no_negative_zero() -> None:
    assert str(Interval(-1e-6, -0.02, 1e-6)) == "+0.0000 [-0.0200, +0.0000]"
