"""What is scored in another way than a deployed model sees it is named by every run on prompts."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import LlamaConfig

from kvsearch import evaluate
from kvsearch.models.load import LoadedModel, load_model
from kvsearch.session import self_check as checks
from kvsearch.workloads.items import ids
from kvsearch.workloads.prompts.files import read
from tests.tokenizer_kinds import KINDS, kind

CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def with_tokenizer(name: str) -> Any:
    model = SimpleNamespace(config=LlamaConfig())
    return SimpleNamespace(tokenizer=kind(name), name="m", model=model)


@pytest.fixture
def loaded(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    """Weights so large that its first choices are no ties."""
    monkeypatch.setattr("kvsearch.models.disk_cache.cache_folder", lambda: tmp_path / "cache")
    found = load_model(str(tiny_folder), announce=lambda _: None)
    for p in found.model.parameters():
        if p.dim() > 1:
            p.data.mul_(12)
    return found


@pytest.mark.parametrize("name", KINDS)
def test_a_text_cut_anywhere_is_that_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = with_tokenizer(name)
    assert checks.text_fault(loaded) == ""
    with monkeypatch.context() as patch:  # a question and an answer each tokenised alone
        patch.setattr(
            "kvsearch.workloads.prompts.encode.following", lambda encode, _, text: encode(text)
        )
        alone = name in ("llama 2, legacy", "llama 2, mistral", "metaspace always", "unigram",
                         "gpt2, space")  # fmt: skip
        assert ("does not continue a text" in checks.text_fault(loaded)) == alone
    with monkeypatch.context() as patch:  # what begins a text is always put, or never
        patch.setattr("kvsearch.workloads.prompts.encode.begun", lambda start, x: [*start, *x])
        assert bool(checks.text_fault(loaded)) == bool(checks.start_of(loaded))
        patch.setattr("kvsearch.workloads.prompts.encode.begun", lambda start, x: x)
        assert bool(checks.text_fault(loaded)) == bool(checks.start_of(loaded))
    with monkeypatch.context() as patch:  # a space before every answer
        patch.setattr("kvsearch.session.self_check.Turn", lambda q, a: checks_turn(q, f" {a}"))
        assert checks.text_fault(loaded)


def checks_turn(question: str, answer: str) -> Any:
    return SimpleNamespace(question=question, answer=answer, tokens=None, about=None, gap="")


def test_a_template_that_speaks_for_the_assistant_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = with_tokenizer("smollm2")
    monkeypatch.setattr(loaded.tokenizer, "chat_template", CHATML)
    assert checks.template_fault(loaded) == ""
    said = ids(loaded.tokenizer("<think></think>Under the mat.")["input_ids"])
    monkeypatch.setattr(
        "kvsearch.workloads.prompts.encode.pieces", lambda *_: [[(ids([40]), said)]]
    )
    assert "'<think></think>Under the mat.'" in checks.template_fault(loaded)


def test_the_full_cache_gives_what_the_model_says_without(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    file = tmp_path / "mine.jsonl"
    rows = [{"prompt": f"The code of lamp {i} is", "answer": "10007"} for i in range(3)]
    file.write_text("\n".join(map(json.dumps, rows)))
    found = evaluate(["full"], loaded, prompts=file, progress=True)
    assert found.self_check == "" == found.document()["self_check"]
    said = capsys.readouterr().err.replace("\n", " ")
    assert "3 of 3 answers go on in the last word" in said and "self-check" not in said
    prompt = ids(loaded.tokenizer("The code of the lamp")["input_ids"])
    assert len([*checks._without_cache(loaded, prompt)]) > 3  # tokens that are compared, no ties

    good = checks._without_cache
    monkeypatch.setattr(checks, "_without_cache", lambda *a: [(t + 1) % 256 for t in good(*a)])
    assert "the full cache does not give the answer" in checks.answer_fault(loaded, prompt)
    again = evaluate(["full"], loaded, prompts=file)
    assert again.self_check == ""  # it was tried once for this model
    monkeypatch.setattr("kvsearch.models.disk_cache.cache_folder", lambda: tmp_path / "other")
    told = evaluate(["full"], loaded, prompts=file, progress=True).self_check
    assert told.startswith("self-check of ") and told in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"prompt": "It is", "answer": "Ann"}, True),
        ({"prompt": "It is", "answer": " Ann"}, False),
        ({"prompt": "It is", "answer": "Ann", "answer_gap": " "}, False),
        ({"prompt": "It is:\n", "answer": "Ann"}, False),
        ({"prompt": "日本の首都は", "answer": "東京"}, False),
        ({"context": "It", "question": "is", "answer": "7"}, True),
        ({"prompt": "It is"}, False),
    ],
)
def test_answers_without_a_space_are_pointed_out(
    row: dict[str, Any], told: bool, tmp_path: Path
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps(row))
    assert bool(checks.joined("a.jsonl", read(file))) == told
