"""`kvsearch run --config` and `kvsearch init`, both made from the options."""

import json
from pathlib import Path
from typing import Any

import click
import pytest

from kvsearch.cli.run import command as run
from kvsearch.errors import SpaceError
from kvsearch.options.from_yaml import template
from kvsearch.options.run_config import RunConfig
from kvsearch.policy_space import load
from kvsearch.yaml_file import read_mapping
from tests.command import call, exit_code

DEEP = "a: " + "[" * 100_000


def parsed(*argv: str) -> dict[str, Any]:
    return run.make_context("run", list(argv)).params


def test_the_file_that_init_writes_has_every_option_and_changes_nothing(
    tmp_path: Path, capsys: Any
) -> None:
    file = tmp_path / "run.yaml"
    assert exit_code("init", file) == 0
    assert file.read_text() == template(run, "run.yaml")
    assert parsed("--config", str(file)) == parsed()
    text = file.read_text()
    for option in run.params:
        if isinstance(option, click.Option) and option.name not in ("config", "debug"):
            key = option.opts[0].removeprefix("--").replace("-", "_")
            assert f"\n{key}: " in text or f"\n# {key}: " in text
            assert " ".join((option.help or "?").split()) in text
    file.write_text("mine")
    code, _, err = call(["init", str(file)], capsys)
    assert code == 2 and "--force" in err
    assert file.read_text() == "mine"
    assert exit_code("init", file, "--force") == 0
    assert file.read_text() == text


def test_the_command_line_goes_before_the_file(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(
        "budget: 96\ntext: [a.txt, 'b.txt:0-9']\ntrials: 9\nno_bench: true\nexclude_method: h2o\n"
        "out: runs/a\nseed: null\n"
    )
    found = parsed("--trials", "4", "--config", str(file))
    assert found["budget_slots"] == 96 and found["text"] == ("a.txt", "b.txt:0-9")
    assert found["trials"] == 4 and found["bench"] is False and found["seed"] == 0
    assert found["exclude_method"] == ("h2o",) and found["out"] == Path("runs/a")
    assert parsed("--config", str(file), "--bench")["bench"] is True
    other = parsed("--config", str(file), "--budget-bytes", "9000", "--dataset", "ptb")
    assert (other["budget_slots"], other["budget_bytes"]) == (None, 9000)
    assert (other["text"], other["dataset"]) == ((), "ptb")
    file.write_text("budget: 1e3")  # text in YAML 1.1
    assert parsed("--config", str(file))["budget_slots"] == 1000.0


@pytest.mark.parametrize(
    "argv",
    [
        "--budget 96.5 --text a.txt --text b.txt:0-9 --trials 0 --no-bench --out runs/a --seed 3",
        "--budget-bytes 5MB --task ruler,tokens=500 --task needle:4 --see aware --prompts a.jsonl",
        "--objectives nll,bytes,throughput --exclude-method h2o --no-warm-start --workers 0",
        "--minutes 1e-3 --heads h.json --measure-heads --engine tune --all-methods --dtype float16",
        "",
    ],
)
def test_the_options_in_a_study_json_are_read_back(argv: str, tmp_path: Path) -> None:
    def asked(*given: str) -> RunConfig:
        return RunConfig(
            **{k: v for k, v in parsed(*given).items() if k not in ("as_json", "quiet", "strict")}
        )

    mine, file = asked(*argv.split()), tmp_path / "study.json"
    document = {"schema": "kvsearch.run/3", "settings": {"seed": 9}, "options": mine.plain()}
    file.write_text(json.dumps(document, indent=2))
    assert asked("--config", str(file)) == mine
    assert mine == RunConfig(**mine.plain())


@pytest.mark.parametrize(
    ("given", "size"),
    [("5000000", 5_000_000), ("5MB", 5_000_000), ("4.8 MiB", 5_033_164), ("1.5kb", 1500)],
)
def test_a_budget_in_bytes_may_have_a_unit(given: str, size: int, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(f"budget_bytes: {given}")
    assert parsed("--budget-bytes", given)["budget_bytes"] == size
    assert parsed("--config", str(file))["budget_bytes"] == size


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("trails: 3", "unknown key 'trails'; did you mean 'trials'"),
        ("3: 4", "unknown key 3"),
        ("config: other.yaml", "unknown key 'config'"),
        ("trials: many", "trials: expected a whole number or auto, got text"),
        ("trials: 3.5", "trials: expected a whole number or auto, got 3.5"),
        ("budget: {slots: 3}", "budget: expected a number, got a mapping"),
        ("budget_bytes: true", "budget_bytes: expected a size in bytes, got True"),
        ("text: [a.txt, {b: c}]", "text.1: expected text, got a mapping"),
        ("engine: tuna", "engine: unknown value 'tuna'; did you mean 'tune'?"),
        ('out: "a\\0b"', "out: a zero byte is in no name"),
        ("bench: true\nno_bench: true", "bench and no_bench set the same option"),
        ("budget: 3\nbudget_slots: 4", "budget and budget_slots set the same option"),
        ("trials: 3\nseed: 1\ntrials: 4", "(line 3): key 'trials' is given twice; keep one"),
        ("- a", "expected a mapping, got a list"),
        ("a: [", "not YAML (line"),
        ("a: 2026-99-99", "not YAML: month must be"),
        ("a: !!python/object:os.system x", "not YAML"),
        (DEEP, "nested too deeply"),
    ],
)
def test_a_mistake_in_a_file_is_one_sentence(
    content: str, said: str, tmp_path: Path, capsys: Any
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(content)
    code, out, err = call(["run", "--config", str(file)], capsys)
    assert code == 2 and said in err and out == ""
    assert err.count("\n") == 1 and len(err) < 1000


def test_spaces_are_read_by_the_same_reader(tmp_path: Path) -> None:
    file = tmp_path / "space.yaml"
    axis = "  sinks: {choice: [0, 4]}\n"
    for content, said in (
        (DEEP, "nested too deeply"),
        ("- a", "expected a mapping"),
        (f"version: 2\nname: a\naxes:\n{axis}{axis}", r"\(line 5\): key 'sinks' is given twice"),
    ):
        file.write_text(content)
        with pytest.raises(SpaceError, match=said):
            load(str(file))
    merged = "a: &a {choice: [0]}\nb: {<<: *a, choice: [4]}\n"  # the file's own word goes first
    file.write_text(merged)
    assert read_mapping(file, "x", SpaceError)["b"] == {"choice": [4]}
    file.write_text("version: 2\nname: a\naxes: &a\n  interval: *a\n")
    with pytest.raises(SpaceError) as error:
        load(str(file))
    assert "\n" not in str(error.value)


def test_a_step_of_short_windows_has_a_thousand_tokens() -> None:
    """On two windows of 640 tokens a search chose what lost three times as much elsewhere."""
    steps = [
        RunConfig(context=n, budget_slots=64, text_only=True).together
        for n in (1536, 1024, 640, 192)
    ]
    assert steps == [1, 1, 2, 6]
    assert RunConfig(context=640, budget_slots=64).together == 4  # windows, and contexts of facts
    assert RunConfig(context=192, budget_slots=64, batch=3, text_only=True).together == 3
