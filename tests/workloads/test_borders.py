"""What is scored is what the model sees: tokens of the whole text, cut where its parts meet."""

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig

from kvsearch.errors import KvsearchError
from kvsearch.workloads import Item, Material, See, make, parse
from kvsearch.workloads.items import ids
from kvsearch.workloads.prompts.encode import items_of
from kvsearch.workloads.prompts.files import read
from kvsearch.workloads.text import Source, tokenize, windows
from kvsearch.workloads.text.borders import encoder, start_of
from kvsearch.workloads.text.endings import full_stop
from tests.tokenizer_kinds import KINDS, LINES, kind

CLEAN = [  # no token of any kind reaches across these borders
    ("The code of the lamp", " of Ann is", " 10007"),
    ("The code of the lamp of Ann is", "", " 10007"),
    ("The code of the lamp of Ann is 10007", "\nAnswer:", " otter"),
    ("A list of rooms.\nName: otter\n", "Question: which?\nAnswer:\n", "lantern"),
    ('She said: "Hello there', '", and left', "."),
    ("She said:", ' "', "Hello there"),
]
JOINED = [  # those of some kinds do
    ("The code of the lamp ", "of Ann is ", "10007"),
    ("The lan", "ter", "n"),
    ("def add(a, b)", ":\n", "    return a + b"),
    ("The code of Ann is 100", "0", "7."),
    ("A list of rooms.", "\nQuestion: which?\n", "\nlantern"),
    ("日本の首都は", "", "東京"),
    ("日本", "の", "東京"),
    ("The code is (", "", "3)"),
    ('{"city": "', "", 'Paris"}'),
    ("x = foo.", "", "bar"),
    ("Answer: \n", "\n \n", "  Ann"),
    ("me@", "", "code.Ann"),
    ("print(add(1,", "", "2))"),
    ("The code", " ", " of"),
]


def loaded_with(tokenizer: Any) -> Any:
    return SimpleNamespace(
        tokenizer=tokenizer, name="m", model=SimpleNamespace(config=LlamaConfig())
    )


def item_of(tokenizer: Any, tmp_path: Path, row: dict[str, Any], see: See = "agnostic") -> Item:
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps(row))
    made = items_of(loaded_with(tokenizer), "a", read(file), see, lambda *_: ids([1]))
    return made.items[0]


@dataclass
class Parts:
    context: list[int]
    question: list[int]
    answer: list[int]

    @classmethod
    def of(cls, item: Item) -> "Parts":
        ask = item.asks[0]
        return cls(*(x.tolist() for x in (item.context, ask.question, ask.answer)))

    @property
    def all(self) -> list[int]:
        return [*self.context, *self.question, *self.answer]


def row_of(context: str, question: str, answer: str) -> dict[str, str]:
    asked = {"context": context, "question": question} if question else {"prompt": context}
    return {**asked, "answer": answer}


@pytest.mark.parametrize("name", KINDS)
def test_parts_are_the_whole_text_where_its_tokens_end(name: str, tmp_path: Path) -> None:
    tokenizer = kind(name)

    def whole(text: str) -> list[int]:
        return list(tokenizer(text)["input_ids"])

    for case in CLEAN + JOINED:
        context, question, _ = case
        text, asked = "".join(case), context + question
        got = Parts.of(item_of(tokenizer, tmp_path, row_of(*case)))
        aware = Parts.of(item_of(tokenizer, tmp_path, row_of(*case), "aware"))
        assert got.context == whole(context), case  # whatever the question is
        assert aware.context + aware.question == whole(asked), case  # one prompt
        for parts in (got, aware):
            said = tokenizer.decode(parts.all, skip_special_tokens=True)
            assert said == tokenizer.decode(whole(text), skip_special_tokens=True), case
        free = [whole(text)[: len(begin)] == begin for begin in (whole(context), whole(asked))]
        assert got.all == whole(text) or not all(free), case
        assert aware.all == whole(text) or not free[1], case
        assert all(free) or case in JOINED, case


@pytest.mark.parametrize("name", KINDS)
def test_answers_are_taken_as_given(name: str, tmp_path: Path) -> None:
    tokenizer, said = kind(name), {}
    for label, more in (("", {}), ("gap", {"answer_gap": " "})):
        parts = Parts.of(
            item_of(tokenizer, tmp_path, {**row_of("The code (", "", "otter"), **more})
        )
        said[label] = tokenizer.decode(parts.all, skip_special_tokens=True).strip()
    assert said == {"": "The code (otter", "gap": "The code ( otter"}


def test_a_gap_is_a_text(tmp_path: Path) -> None:
    with pytest.raises(KvsearchError, match="line 1: field answer_gap: give a text, got 1"):
        item_of(kind("gpt2"), tmp_path, {"prompt": "x", "answer": "y", "answer_gap": 1})


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"context": "a", "question": "b", "answer_prefix": " It is", "answer": ["c"]}, " c"),
        ({"context": "a", "question": "b\n", "answer": ["c"]}, "c"),
        (
            {"context": "文", "question": "问", "answer_prefix": "回答\uff1a", "answer": "北京"},
            "北京",
        ),
    ],
)
def test_references_of_kvpress_sets_stand_after_a_space(
    row: dict[str, Any], answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvsearch.workloads.prompts.hub.rows", lambda _: [row])
    tokenizer = kind("gpt2")
    for spec, want in (("longbench:x", answer), ("hf:me/mine", answer.strip())):
        loaded = loaded_with(tokenizer)
        made = items_of(loaded, "a", read(Path(spec)), "agnostic", lambda *_: ids([1]))
        assert tokenizer.decode(made.items[0].asks[0].answer) == want


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("task", ["needle", "recall", "chains", "instructions", "ruler/vt"])
def test_tasks_ask_for_the_tokens_that_the_context_has(name: str, task: str) -> None:
    tokenizer = kind(name)
    encode, start = encoder(tokenizer), start_of(tokenizer)
    prose = np.array(encode(LINES[0].strip() * 9))
    spec = parse(f"{task},tokens={1600 if 'ruler' in task else 400}")
    for item in make(
        spec, Material(encode, start, prose, spec.tokens, "report"), 3, "agnostic"
    ).items:
        assert item.context[: len(start)].tolist() == list(start)
        assert item.context.size <= spec.tokens
        for ask in item.asks:
            begun = tokenizer.convert_ids_to_tokens(int(ask.question[0]))
            assert begun not in ("▁", "Ġ"), begun
            if task == "needle":  # the same after " is" in the context
                lines = [item.context[i : i + ask.answer.size] for i in range(item.context.size)]
                assert any(np.array_equal(line, ask.answer) for line in lines)
            asked = tokenizer.decode(ask.question)
            text = tokenizer.decode([*ask.question, *ask.answer])
            assert text.startswith(asked) and "  " not in text
            natural = encode("x" + text)[-ask.answer.size :]
            assert natural == ask.answer.tolist()
        if task in ("recall", "ruler/vt"):  # no prose, which is cut anywhere
            whole = tokenizer.decode(item.context, skip_special_tokens=True)
            assert item.context.tolist() == tokenizer(whole)["input_ids"]


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("llama 2, legacy", ("<s>",)), ("gemma", ("<s>",)), ("llama 3", ("<|begin_of_text|>",)),
        ("glm", ("[gMASK]", "<sop>")), ("qwen", ()), ("gpt2, space", ()),
    ],
)  # fmt: skip
def test_what_begins_a_text_is_there_once_and_whole(
    name: str, start: tuple[str, ...], tmp_path: Path
) -> None:
    tokenizer = kind(name)
    lead = tokenizer.convert_tokens_to_ids([*start])
    assert start_of(tokenizer) == tuple(lead)
    for there in range(len(start) + 1):  # of a text that begins with some of them already
        text = "".join(start[len(start) - there :]) + LINES[0] * 3
        for row in (
            {"prompt": text, "answer": "x"},
            {"context": text, "question": "y", "answer": "x"},
        ):
            context = item_of(tokenizer, tmp_path, row).context.tolist()
            assert context[: len(lead)] == lead and not {*context[len(lead) :]} & {*lead}
        tokens = tokenize(tokenizer, Source.of("text", text, ""))
        rows = windows(tokens, count=1, length=tokens.ids.size + len(lead))
        assert rows[0].tolist() == [*lead, *encoder(tokenizer)(LINES[0] * 3)] or there
        assert rows[0, : len(lead)].tolist() == lead
        assert not {*rows[0, len(lead) :].tolist()} & {*lead}


@pytest.mark.parametrize("name", KINDS)
def test_a_full_stop_is_the_one_after_a_word(name: str) -> None:
    tokenizer = kind(name)
    words = tokenizer.convert_ids_to_tokens(encoder(tokenizer)("of the lamp."))
    assert tokenizer.convert_ids_to_tokens(full_stop(tokenizer)) == words[-1] == "."
