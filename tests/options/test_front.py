"""`kvsearch.search` and `kvsearch.evaluate`: the options of the command line, and their results."""

import copy
import inspect
from collections.abc import Callable
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import numpy as np
import optuna
import pytest
from transformers import AutoModelForCausalLM

import kvsearch
from kvsearch import LoadedModel, Policy, Text
from kvsearch.commands.evaluated import Evaluated
from kvsearch.errors import KvsearchError
from kvsearch.options.checks import names
from kvsearch.options.other_commands import EvaluateConfig
from kvsearch.policy_space import load as load_space
from kvsearch.results.records import Trial
from kvsearch.workloads import parse

WORDS = Text(" ".join(f"{(i * i + 3 * i) % 97:x}" for i in range(1500)), "numbers")


@pytest.fixture(scope="module")
def mine(tiny_folder: Path, tiny_tokenizer: Any) -> LoadedModel:
    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    return LoadedModel.of(model, tiny_tokenizer, "mine")


COMMANDS = {  # a command -> what it has to be given
    "run": [], "eval": ["h2o"], "export": ["h2o"], "bench": ["h2o"], "prune": ["h2o", "--out", "p"],
    "adapt": ["h2o", "--out", "p"], "push": ["p"], "heads": [], "tasks": [], "targets": [],
    "methods": [], "need": [], "verify": ["p"],
}  # fmt: skip
NAMES = {"run": "search", "eval": "evaluate"}
DIFFER = {"workers": 0}  # in Python, where a script may be without a guard; else None
OTHERS = {  # options for which Python has a function, or an attribute, of its own
    "run": {"strict"},  # `SearchResult.within_limits`
    "eval": {"max_drop"},  # `EvaluateResult.beyond`
    "adapt": {"rule"},  # `learn`
}


@pytest.mark.parametrize("name", COMMANDS)
def test_python_and_the_command_line_have_the_same_options(name: str) -> None:
    function = getattr(kvsearch, NAMES.get(name, name))
    here = inspect.signature(function).parameters
    command: click.Command = import_module(f"kvsearch.cli.{name}").command
    there = command.make_context("", list(COMMANDS[name])).params
    only = {"config", "as_json", "quiet", *OTHERS.get(name, ())}
    assert set(here) - {"progress"} == set(there) - only
    assert "progress" not in here or here["progress"].default is False
    for option in set(here) & set(there) - {"policy", "policies", "source", "out"}:
        default = names(there[option]) if option == "objectives" else there[option]
        default = DIFFER.get(option, default)
        assert repr(here[option].default) == repr(default), option  # 0 is neither None nor False
    said = inspect.getdoc(function) or ""
    assert all(f"\n    {option}: " in said or f", {option}: " in said for option in here)
    if name not in ("push", "targets", "methods"):  # which have few, and share none
        with pytest.raises(KvsearchError, match=f"{function.__name__} has no option 'outt'"):
            function(outt=1)


def test_a_function_takes_its_config_or_the_options_of_it(mine: LoadedModel) -> None:
    how: dict[str, Any] = {"budget_slots": 40, "context": 128}
    config = EvaluateConfig("h2o", mine, WORDS, **how)
    found = kvsearch.evaluate(config), kvsearch.evaluate("h2o", mine, text=WORDS, **how)
    assert found[0].rows[0].nll == found[1].rows[0].nll
    assert replace(config, batch=2).plain() == {**config.plain(), "batch": 2}
    for wrong in ({"batch": 0}, {"budget_bytes": 9}, {"dataset": "ptb"}):
        with pytest.raises(KvsearchError):
            replace(config, **wrong)


def test_every_public_name_is_there_and_functions_say_what_they_return() -> None:
    for name in kvsearch.__all__:
        found = getattr(kvsearch, name)
        said = inspect.getdoc(found)
        assert said and not inspect.ismodule(found), name
        assert not inspect.isfunction(found) or "Returns:" in said, name
    assert {*kvsearch.__all__} <= {*dir(kvsearch)}
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = kvsearch.nothing  # type: ignore[attr-defined]


def test_a_search_in_python(mine: LoadedModel, tmp_path: Path, capfd: Any) -> None:
    unit = mine.shape.budget_bytes(1)
    how: dict[str, Any] = dict(
        context=128, trials=1, warm_start=False, space="h2o-int4", bench=False
    )
    found = kvsearch.search(mine, WORDS, budget_bytes=40 * unit, out=tmp_path / "run", **how)
    assert capfd.readouterr() == ("", "")
    assert isinstance(found.best, Policy) and found.report().is_file()
    assert found.summary.settings.budget_slots == 40
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
    limits = {f"{name}_{end}" for name in ("dnll_full", "lost", "exact") for end in ("lo", "hi")}
    assert set(frame) == {f.name for f in fields(Evaluated)} | limits
    assert np.allclose(frame.dnll_full, frame.nll - found.workloads[0].full, atol=1e-6)
    assert found.workloads[0].scored == 2 * (128 - 40) and "h2o" in repr(found)
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


def test_a_search_with_an_optuna_sampler(mine: LoadedModel, tmp_path: Path) -> None:
    how: dict[str, Any] = dict(
        budget_slots=40, context=128, trials=2, warm_start=False, space="h2o-int4", bench=False
    )
    fixed = optuna.samplers.RandomSampler(seed=3)
    there = optuna.create_study(directions=["minimize"] * 2, sampler=copy.deepcopy(fixed))
    want = load_space("h2o-int4").suggest(there.ask())
    found = kvsearch.search(mine, WORDS, sampler=fixed, out=tmp_path / "run", **how)
    first = min(found.summary.trials, key=lambda t: t.number)
    assert first.params == want and found.summary.settings.plain()["sampler"] == "RandomSampler"
    again = kvsearch.search(mine, WORDS, sampler=fixed, out=tmp_path / "run", **how)
    assert again.best == found.best
    with pytest.raises(KvsearchError, match=r"CmaEsSampler cannot propose .* use kvei or"):
        kvsearch.search(mine, WORDS, sampler=optuna.samplers.CmaEsSampler(), **how)
    with pytest.raises(KvsearchError, match=r"the sampler is of type .?int.?; give a name"):
        kvsearch.search(mine, WORDS, sampler=3, **how)  # type: ignore[arg-type]


def test_a_family_of_tasks_is_known_in_python(
    mine: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def stop(spec: str) -> None:
        seen.append(spec)
        if spec.startswith("ruler/vt"):
            raise KvsearchError("seen")
        return parse("needle,tokens=300")  # the others read data of a package

    monkeypatch.setattr("kvsearch.options.workload.parse", stop)
    calls: list[Callable[[], object]] = [
        lambda: kvsearch.search(mine, tasks="ruler,tokens=300", budget_slots=40),
        lambda: kvsearch.evaluate("full", mine, tasks="ruler,tokens=300"),
        lambda: kvsearch.tasks(mine, tasks="ruler,tokens=300"),
    ]
    for call in calls:
        with pytest.raises(KvsearchError, match="seen"):
            call()
    assert seen.count("ruler/vt,tokens=300") == 3


def test_bench_export_and_the_tables_in_python(mine: LoadedModel, tmp_path: Path) -> None:
    timed = kvsearch.bench("h2o", mine, WORDS, budget_slots=40, context=96, pairs=1, steps=2)
    assert timed.policy == "h2o" and timed.document()["policy"] == "h2o"
    file = tmp_path / "best.json"
    file.write_text(Policy(slots=40, sinks=2).to_json())
    done = kvsearch.export(tmp_path, out=tmp_path / "there")  # a folder is that of a run
    assert done.given.slots == 40 and all(f.is_file() for f in done.files)
    with pytest.raises(KvsearchError, match="needs a file or folder, not a Policy"):
        kvsearch.export(Policy(slots=40), "optuna")  # type: ignore[arg-type]
    with pytest.raises(KvsearchError, match="needs that of a run"):
        kvsearch.export(tmp_path, "optuna")
    assert kvsearch.methods()["h2o"].baseline
    assert {t.name for t in kvsearch.targets()} >= {"transformers", "vllm"}
    assert "needle" in kvsearch.tasks()
    with pytest.raises(KvsearchError, match="give --model, too"):
        kvsearch.tasks(None, tasks="needle")  # type: ignore[call-overload]
