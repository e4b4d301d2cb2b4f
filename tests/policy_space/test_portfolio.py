"""Policies of earlier searches: read, kept apart from published methods, and tried first."""

import csv
import json
from pathlib import Path
from typing import Any

import optuna
import pytest

from kvsearch.errors import SpaceError
from kvsearch.policy_space import load as load_space
from kvsearch.policy_space.portfolio import inside, load
from tests.command import call
from tests.survival import toy

ROOT = Path(__file__).resolve().parents[2]
STUDY = ROOT / "studies" / "2026-11-text-and-facts"


def test_every_point_is_one_of_the_default_space_and_names_its_record() -> None:
    points = load("default")
    for space in ("default", "prompts"):
        assert [n for n, _ in inside(points, load_space(space))] == list(points)
    for point in points.values():
        assert (ROOT / point.about.split(",")[0]).is_dir(), point.about
    assert inside(points, load_space("default").model_copy(update={"axes": {}})) == ()
    with open(STUDY / "points.csv", newline="") as f:
        learned = {row["name"]: json.loads(row["knobs"]) for row in csv.DictReader(f)}
    assert {name: point.knobs for name, point in points.items()} == learned


def test_earlier_policies_come_first_and_are_no_published_methods(tmp_path: Path) -> None:
    points = inside(load("default"), toy.SPACE)
    session = toy.Session(toy.Toy(tmp_path / "log", 0.0))
    trials = toy.searched(tmp_path / "run", session, toy.task(2, portfolio=points))
    assert [(t.name, t.kind) for t in trials[: len(points)]] == [(n, "earlier") for n, _ in points]
    assert {t.kind for t in trials[len(points) :]} == {"combined", "method", "searched"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("version: 2\npoints: []\n", "version 2; this kvsearch reads version 1"),
        ("points: []\n", "version None"),
        ("version: 1\npoints: [{name: a, source: s, knobs: {rule: h20}}]\n", "points.0.knobs.rule"),
        ("version: 1\npoints: [{name: h2o, source: s, knobs: {}}]\n", "points.0.name: 'h2o' is"),
        ("version: 1\npoints: 3\n", "field points"),
        ("[", "not YAML"),
    ],
)
def test_a_wrong_file_is_one_sentence(text: str, said: str, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "portfolio.yaml"
    file.write_text(text)
    with pytest.raises(SpaceError, match=said.replace("'", ".")):
        load(str(file))
    code, _, err = call(["run", "--portfolio", str(file), "--out", str(tmp_path / "out")], capsys)
    assert code == 2 and said in err and not (tmp_path / "out").exists()


@pytest.mark.parametrize("proposals", [0, 3])
def test_proposals_end_where_nothing_is_expected_of_them(proposals: int, tmp_path: Path) -> None:
    def enough(study: optuna.Study) -> bool:
        done = [t for t in study.get_trials(deepcopy=False) if t.number >= methods]
        return len(done) >= proposals

    session = toy.Session(toy.Toy(tmp_path / "log", 0.0))
    methods, counts = 10**6, []
    for name, task in (
        ("none", toy.task(0, "random")), ("few", toy.task(9, "random", enough=enough)),
    ):  # fmt: skip
        trials = toy.searched(tmp_path / name, session, task)
        methods = max(t.number for t in trials) + 1 if name == "none" else methods
        counts.append(sum(t.kind == "searched" for t in trials))
    assert counts == [0, proposals]
