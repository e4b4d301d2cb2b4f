"""Values in messages: one line, cut, whatever a caller gave; and the remedy stays in it."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvsearch
from kvsearch import Policy, Text
from kvsearch.commands.adapt import adapt
from kvsearch.commands.export import export
from kvsearch.commands.prune import prune
from kvsearch.errors import KvsearchError, ModelError, nearest, quoted
from kvsearch.models import load_model
from tests.command import call

VALUES = {
    "a text": "It was the best of times, it was\nthe worst. " * 1100,
    "a word": "x" * 47_000,
    "control characters": "a\x1b[31mb\nc",
    "a zero byte": "a\0b",
    "half a character": "a\ud800b",
}
WORDS = Text("word " * 300)
CALLS: dict[str, Callable[[Any], object]] = {
    "text": lambda v: kvsearch.evaluate("full", text=v),
    "texts": lambda v: kvsearch.search(text=[v, v]),
    "report text": lambda v: kvsearch.search(report_text=v),
    "policy": lambda v: kvsearch.evaluate(v),
    "policy file": lambda v: kvsearch.evaluate(f"{v}.json"),
    "policy, read": Policy.from_json,
    "policy, parsed": Policy.parse,
    "field": lambda v: Policy.build({v: 1}),
    "value": lambda v: Policy.build({"slots": v}),
    "rule": lambda v: Policy.build({"slots": 64, "rule": {"name": v}}),
    "model": lambda v: load_model(v, announce=lambda _: None),
    "model, a path": lambda v: load_model(f"./{v}", announce=lambda _: None),
    "dtype": lambda v: load_model(dtype=v),
    "device": lambda v: load_model(device=v),
    "space": lambda v: kvsearch.search(space=v),
    "space, a file": lambda v: kvsearch.search(space=f"{v}.yaml"),
    "sampler": lambda v: kvsearch.search(sampler=v),
    "target": lambda v: kvsearch.search(target=v),
    "engine": lambda v: kvsearch.search(engine=v),
    "objectives": lambda v: kvsearch.search(objectives=v),
    "methods": lambda v: kvsearch.search(exclude_method=v),
    "portfolio": lambda v: kvsearch.search(portfolio=v),
    "losses": lambda v: kvsearch.evaluate("full", text=WORDS, nll_out=f"no/{v}"),
    "export to": lambda v: export("h2o", v),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("value", VALUES)
def test_a_message_is_one_line_whatever_it_names(
    call: str, value: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "no").write_text("a file, so that nothing is written below it")
    with pytest.raises(KvsearchError) as caught:
        CALLS[call](VALUES[value])
    said = str(caught.value)
    assert said.isprintable() and len(said) <= 1000
    assert VALUES[value][:300] not in said or len(VALUES[value]) < 20


@pytest.mark.parametrize("value", ["a text", "a word"])
def test_a_text_given_as_a_path_is_told_about_texts(value: str) -> None:
    with pytest.raises(KvsearchError, match=r"give a text itself as kvsearch\.Text\(") as caught:
        kvsearch.evaluate("full", text=VALUES[value])
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("value", [3, b"abc", [1], {"a": 1}, Path, Text(b"abc")])
def test_other_types_are_told_what_a_text_is(value: Any) -> None:
    with pytest.raises(KvsearchError, match=r"(a path, kvsearch|the text of kvsearch)\.Text\("):
        kvsearch.evaluate("full", text=value)


def test_a_model_of_transformers_itself_is_told_how_it_is_given() -> None:
    class Model:
        def __repr__(self) -> str:
            return "(layer)\n" * 9000

    given: Any = Model()
    for ask in (
        lambda: kvsearch.evaluate("full", given),
        lambda: kvsearch.search(given),
        lambda: adapt(Policy(slots=40), given, WORDS, "out", progress=False),
        lambda: prune("kvpruner-01-20", given, "out", progress=False),
    ):
        with pytest.raises(ModelError, match=r"not a Model; give LoadedModel\.of\(model, tok"):
            ask()


def test_folders_with_impossible_names_are_refused(tiny_folder: Path) -> None:
    mine = str(tiny_folder)
    for value in (VALUES["a word"], VALUES["a zero byte"]):
        for ask in (
            lambda v: adapt(Policy(slots=40), mine, WORDS, v, context=64, progress=False),
            lambda v: prune("kvpruner-01-20", mine, v, progress=False),
            lambda v: kvsearch.search(mine, WORDS, out=v, context=128, budget_slots=40),
        ):
            with pytest.raises(KvsearchError, match="cannot write") as caught:
                ask(value)
            assert len(str(caught.value)) < 300


def test_the_command_line_cuts_what_click_says(capsys: Any) -> None:
    long = "x" * 9000
    for argv in ([long], ["run", "--budget", long], ["eval", "h2o", f"--{long}"]):
        code, _, err = call(argv, capsys)
        assert code == 2 and err.count("\n") == 1 and len(err) < 1100


def test_an_error_keeps_its_message_across_processes() -> None:
    error = pickle.loads(pickle.dumps(ModelError("no " + "x\n" * 2000 + "give another one")))
    assert isinstance(error, ModelError) and str(error).endswith("give another one")
    assert len(str(error)) <= 1000


def test_values_are_cut() -> None:
    assert quoted("a\nb") == "'a\\nb'" and quoted(1.5) == "1.5"
    assert quoted("x" * 99) == f"'{'x' * 60}'... (99 characters)"
    assert quoted(list(range(99))).endswith("...") and len(quoted(list(range(99)))) < 80
    assert nearest("h2o" + "x" * 100_000, ["h2o"]) == "; known are h2o"
