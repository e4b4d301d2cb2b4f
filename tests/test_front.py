"""`kvsearch.search` and `kvsearch.evaluate`: the options of the command line, and their results."""

import inspect
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from transformers import AutoModelForCausalLM

import kvsearch
from kvsearch import LoadedModel, Policy, Text
from kvsearch.app.evaluate import Evaluated, evaluate
from kvsearch.app.inputs import names
from kvsearch.app.search import search
from kvsearch.cli import eval as cli_eval
from kvsearch.cli import run as cli_run
from kvsearch.errors import KvsearchError
from kvsearch.policy_search import growing
from kvsearch.records import Trial

WORDS = Text(" ".join(f"{(i * i + 3 * i) % 97:x}" for i in range(1500)), "numbers")


@pytest.fixture(scope="module")
def mine(tiny_folder: Path, tiny_tokenizer: Any) -> LoadedModel:
    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    return LoadedModel.of(model, tiny_tokenizer, "mine")


@pytest.mark.parametrize(
    ("function", "command", "given"),
    [(search, cli_run.command, {}), (evaluate, cli_eval.command, {"policies": ["h2o"]})],
    ids=["search", "evaluate"],
)
def test_python_and_the_command_line_have_the_same_options(
    function: Any, command: click.Command, given: dict[str, list[str]]
) -> None:
    here = inspect.signature(function).parameters
    there = dict(command.make_context("", given.get("policies", [])).params)
    asked = {"tasks", "prompts", "see", "items", "kvpress_out"}  # of `evaluate_prompts`
    only = {"config", "as_json", "quiet", *(asked if "nll_out" in there else ())}
    assert set(here) - {"progress"} == set(there) - only
    for name in set(here) & set(there) - set(given):
        default = names(there[name]) if name == "objectives" else there[name]
        assert (here[name].default or None) == (default or None), name


def test_a_search_in_python(mine: LoadedModel, tmp_path: Path, capfd: Any) -> None:
    unit = mine.shape.budget_bytes(1)
    how: dict[str, Any] = dict(
        context=128, trials=1, warm_start=False, space="h2o-int4", bench=False
    )
    found = kvsearch.search(mine, WORDS, budget_bytes=40 * unit, out=tmp_path / "run", **how)
    assert capfd.readouterr() == ("", "")
    assert isinstance(found.best, Policy) and found.report().is_file()
    assert found.summary.settings["budget_slots"] == 40
    assert found.front and found.front == sorted(found.front, key=lambda r: r.bytes_peak)
    frame = found.to_frame()
    assert list(frame) == [f.name for f in fields(Trial)] and len(frame) == 1
    assert "1 policies tried" in repr(found) and str(found.report()) in repr(found)
    lines = (tmp_path / "run" / "trials.jsonl").read_text()
    again = kvsearch.search(mine, WORDS, budget_slots=40, out=tmp_path / "run", **how)
    assert (tmp_path / "run" / "trials.jsonl").read_text() == lines
    assert again.best == found.best
    with pytest.raises(KvsearchError, match="given in memory"):
        kvsearch.search(mine, WORDS, budget_slots=40, workers=2, out=tmp_path / "b", **how)


@pytest.mark.slow
def test_evaluators_of_their_own_and_whatever_a_search_measures_first(
    tiny_folder: Path, tmp_path: Path
) -> None:
    """Heads and decode speed, with the driver's own model."""
    found = kvsearch.search(
        str(tiny_folder), WORDS, budget_slots=40, context=320, windows=2, report_windows=1,
        trials=1, warm_start=False, bench=False, space="unified", workers=2, out=tmp_path / "run",
        objectives=("nll", "bytes", "throughput"),
    )  # fmt: skip
    there = {file.name for file in (tmp_path / "run").iterdir()}
    assert {"heads.json", "speed.json"} <= there
    assert all(t.speed for t in found.summary.trials if t.state == "complete")


def test_an_evaluation_in_python(mine: LoadedModel, tmp_path: Path, capfd: Any) -> None:
    policies = ["h2o", Policy(slots=30, sinks=4), Policy(slots=20, name="small")]
    found = kvsearch.evaluate(policies, mine, WORDS, budget_slots=40, context=128, windows=2)
    assert capfd.readouterr() == ("", "")
    assert [r.policy for r in found.rows] == ["h2o", "policy 1", "small"]
    frame = found.to_frame()
    assert set(frame) == {f.name for f in fields(Evaluated)} | {"dnll_full_lo", "dnll_full_hi"}
    assert np.allclose(frame.dnll_full, frame.nll - found.full_nll, atol=1e-6)
    assert found.tokens == 2 * (128 - 40) and "h2o" in repr(found)
    file = tmp_path / "numbers.txt"
    file.write_text(WORDS.text)
    same = kvsearch.evaluate("h2o", mine, file, budget_slots=40, context=128, windows=2)
    assert same.rows[0].nll == found.rows[0].nll


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"budget_slots": 40, "budget_bytes": 9000}, "not both"),
        ({"budget_bytes": 0}, "above 0 bytes"),
        ({"budget_slots": 40, "text": Text("  ")}, "is empty"),
        ({"budget_slots": 40, "dtype": "float16"}, "leave both at 'auto'"),
        ({"budget_slots": 40, "context": 1024}, "reach 512 tokens"),
    ],
)
def test_a_mistake_in_python_is_one_sentence(
    how: dict[str, Any], said: str, mine: LoadedModel
) -> None:
    with pytest.raises(KvsearchError, match=said):
        kvsearch.evaluate("h2o", mine, **{"text": WORDS, "context": 128, **how})


def test_the_packages_stay_packages() -> None:
    assert growing is inspect.getmodule(growing.likely)
    assert inspect.signature(kvsearch.search) == inspect.signature(search)
    assert inspect.signature(kvsearch.evaluate) == inspect.signature(evaluate)
