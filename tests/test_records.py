"""Records of a run: nothing is dropped from tables, and older files are read by today's names."""

from dataclasses import fields, replace

import pytest

from kvsearch.errors import RunError
from kvsearch.policy import Policy
from kvsearch.records import Interval, Row, Trial, columns
from kvsearch.report.tables import front_csv
from kvsearch.search import schema
from kvsearch.search.attempts import Attempts

TRIAL = Trial(3, "trial 3", "searched", "pruned", Policy(slots=9), "ab", rungs=((1, 64, 0.5),))


def test_a_table_of_trials_has_every_field() -> None:
    found = columns(Trial, [TRIAL])
    assert list(found) == [f.name for f in fields(Trial)]
    assert found["rungs"] == ["[[1, 64, 0.5]]"] and '"slots": 9' in found["policy"][0]


def row(speed: float | None) -> Row:
    return Row(
        "a", "searched", Policy(slots=9), "ab", 64, 1.0, 0.1, 4, 2.7, Interval(0.1, 0.0, 0.2), None,
        None, 0.1, 100, 90.0, 80, 9.0, True, True, 1.0, speed=speed,
    )  # fmt: skip


def test_front_csv_has_every_field_of_a_row() -> None:
    behind = replace(row(0.7), stopped=Interval(0.2, 0.1, 0.3))
    head = front_csv([behind]).splitlines()[0].split(",")
    named = {"policy": "description", "dnll_full": "dnll_full_lo", "decode": "decode_ratio"}
    assert {named.get(f.name, f.name) for f in fields(Row)} <= set(head)
    assert not {"speed", "stopped"} & {*front_csv([row(None)]).splitlines()[0].split(",")}


def test_files_of_the_first_version_are_read_and_newer_ones_refused() -> None:
    settings = {"budget": 96, "budget_bytes": 9, "warm": True, "also": [], "racing": False}
    found = schema.study({"settings": settings, "trials": 3})
    assert found["settings"] == {
        "budget_slots": 96, "budget_bytes": 9, "warm_start": True, "extra_text": [], "race": False,
        "grow": False,
    }  # fmt: skip
    assert schema.study(found) == found and found["trials"] == 3
    old = {"rows": [{"name": "a", "kind": "found"}], "also": {"also0": {}}, "fits": ["a"]}
    new = schema.measured(old)
    assert new["rows"][0]["kind"] == "searched" and new["compared"] == ["a"]
    assert new["extra_text"] == {"also0": {}} and "also" not in new
    with pytest.raises(RunError, match="this kvsearch reads"):
        schema.measured({"schema": "kvsearch.run/9"})


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
