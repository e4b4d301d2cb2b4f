"""Prompts from files and of the hub, and `kvsearch eval` on prompts and tasks."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvsearch.app.kvpress_results import string_match
from kvsearch.app.prompts import evaluate_prompts
from kvsearch.errors import KvsearchError
from kvsearch.evaluation.answers import answers, greedy_of
from kvsearch.evaluation.quality import Evaluator
from kvsearch.models.load import LoadedModel, load_model
from kvsearch.policy import Policy
from kvsearch.text import Text
from kvsearch.workloads.encode import items_of
from kvsearch.workloads.files import Turn, read
from kvsearch.workloads.items import ids
from tests.command import exit_code

# -- files -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loaded(tiny_folder: Path) -> LoadedModel:
    return load_model(str(tiny_folder), announce=lambda _: None)


def written(tmp_path: Path, name: str, content: str) -> Path:
    file = tmp_path / name
    file.write_text(content)
    return file


def test_the_same_prompts_in_every_format(tmp_path: Path, loaded: LoadedModel) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {"context": "Ann has a cat.", "question": "Who has it?", "answer": "Ann"},
        {"context": "Bob has a dog.", "question": "What?", "answer": "A dog"},
        {"context": "Ann has a cat.", "question": "What has she?", "answer": "a cat"},
    ]
    files = [
        written(tmp_path, "a.jsonl", "\n".join(map(json.dumps, rows)) + "\n\n"),
        written(tmp_path, "a.json", json.dumps(rows)),
        written(tmp_path, "a.csv", "context,question,answer\n"
                + "\n".join(",".join(r.values()) for r in rows)),
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    files.append(tmp_path / "a.parquet")
    kinds = {items_of(loaded, "a", read(f), "agnostic", lambda _: ids([1])).digest for f in files}
    assert len(kinds) == 1
    items = items_of(loaded, "a", read(files[0]), "agnostic", lambda _: ids([1])).items
    assert [len(i.asks) for i in items] == [2, 1]  # one context is taken in once
    assert loaded.tokenizer.decode(items[0].asks[1].answer) == "a cat"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", "x", "is no file of prompts: give one of .jsonl"),
        ("a.jsonl", '{"prompt": "x"}\n{"prompt": }',
         "line 2 is no JSON: Expecting value, column 12"),
        ("a.jsonl", '{"text": "x", "label": 1}', "line 1: no field of prompt, context, messages; "
                                                 "it has text, label"),
        ("a.jsonl", '{"prompt": "x", "answer": ""}', "line 1: field answer: an answer is empty"),
        ("a.jsonl", '{"context": "x", "questions": ["a", "b"], "answers": ["c"]}',
         "line 1: field answers: give one for each of 2"),
        ("a.jsonl", '{"messages": [{"role": "system", "content": "x"}]}', "no message of role"),
        ("a.json", "[1]", "record 1: a prompt is an object"),
        ("a.csv", "question,answer\na,b\n", "line 2: no field of prompt"),
        ("a.jsonl", "\n", "has no prompts"),
        ("a.parquet", "no", "is no Parquet file"),
        ("a.csv", "context,question\na,b,c\n", "line 2: more cells than the 2 columns"),
        ("a.jsonl", '{"prompt": "\\ud800"}', "line 1: half of a character"),
        ("a.jsonl", '{"prompt": "x", "max_new_tokens": 0}', "field max_new_tokens: give a whole"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_one_sentence_with_line_and_field(
    name: str, content: str, said: str, tmp_path: Path, capsys: Any
) -> None:
    file = written(tmp_path, name, content)
    assert exit_code("eval", "h2o", "--budget", "64", "--prompts", str(file)) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


def test_what_files_of_others_have_is_read(tmp_path: Path) -> None:
    """Long cells, lists in cells, other line ends in a text, empty fields, twice the same."""
    rows = [{"prompt": "a\u2028b", "answer": "c", "answers": None}] * 2
    lines = "\n".join(json.dumps(r, ensure_ascii=False) for r in rows)
    (record,) = read(written(tmp_path, "A.JSONL", lines))
    assert record.context == "a\u2028b" and [t.answer for t in record.turns] == ["c"]
    long = "word " * 40_000
    cells = f"context,question,answer,max_new_tokens\n{long},who,\"['Ann', 'Bob']\",7.0\n"
    (record,) = read(written(tmp_path, "b.csv", cells))
    assert record.context == long
    assert (record.turns[0].answer, record.turns[0].tokens) == ("Ann", 7)


def test_a_set_of_the_hub_is_read_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(repo: str, config: str, **how: Any) -> list[dict[str, Any]]:
        asked.append((repo, config, how["split"]))
        return [{"context": "c", "question": "q", "answer_prefix": "A:", "answer": ["1", "2"],
                 "max_new_tokens": 9, "task": "vt"}]  # fmt: skip

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda *a, **k: None)
    monkeypatch.setattr("datasets.load_dataset", load)
    (record,) = read(Path("ruler:8192"))
    assert record.turns == (Turn("qA:", "1", 9),)
    read(Path("hf:me/mine@train"))
    assert asked == [("simonjegou/ruler", "8192", "test"), ("me/mine", None, "train")]
    monkeypatch.setattr("datasets.load_dataset", lambda *a, **k: [{"text": "x"}])
    with pytest.raises(KvsearchError, match="me/mine test: row 1: no field of prompt"):
        read(Path("hf:me/mine"))
    with pytest.raises(KvsearchError, match="give hf:OWNER/NAME"):
        read(Path("hf:mine"))
    with pytest.raises(KvsearchError, match="or a set of the hub; did you mean 'ruler'"):
        read(Path("rulr:4096"))


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_a_chat_is_turns_of_its_template(tmp_path: Path, loaded: LoadedModel) -> None:
    said = [
        {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "and?"}, {"role": "assistant", "content": "bye"},
    ]  # fmt: skip
    file = written(tmp_path, "chat.jsonl", json.dumps({"messages": said}))
    with pytest.raises(KvsearchError, match=r"line 1: field messages: .* has no chat template"):
        items_of(loaded, "chat", read(file), "agnostic", lambda _: ids([1]))
    try:
        loaded.tokenizer.chat_template = TEMPLATE
        (item,) = items_of(loaded, "chat", read(file), "agnostic", lambda _: ids([1])).items
    finally:
        loaded.tokenizer.chat_template = None
    text = loaded.tokenizer.decode
    assert text(item.context) == "<user>hi\n<assistant>"
    assert [text(a.answer) for a in item.asks] == ["hello\n", "bye\n"]
    assert text(item.asks[1].question) == "<user>and?\n<assistant>"
    assert [a.follows for a in item.asks] == [False, True]


@pytest.mark.parametrize(
    "asked_for",
    [
        {}, {"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}, {"num_beams": 3},
        {"suppress_tokens": [*range(64, 200)]}, {"do_sample": True, "temperature": 9.0},
        {"min_new_tokens": 6}, {"forced_eos_token_id": 7}, {"max_length": 5},
    ],
    ids=str,
)  # fmt: skip
def test_without_answers_the_full_caches_own_is_the_reference(
    asked_for: dict[str, Any], tmp_path: Path, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a model's generation configuration asks for beside the end tokens."""
    monkeypatch.setattr("kvsearch.models.disk_cache.cache_folder", lambda: tmp_path / "cache")
    generation = loaded.model.generation_config
    monkeypatch.setattr(generation, "eos_token_id", None)
    for name, value in asked_for.items():
        monkeypatch.setattr(generation, name, value)
    rows = [{"prompt": "The quick brown fox " * 12}, {"prompt": "A fox", "max_new_tokens": 3}]
    file = written(tmp_path, "mine.jsonl", "\n".join(map(json.dumps, rows)))
    asked = items_of(loaded, "mine", read(file), "agnostic", greedy_of(loaded, 6))
    found = answers(Evaluator(loaded), Policy(name="full"), asked)
    assert found.exact.all() and found.tokens.tolist() == [6, 3]
    assert len([*(tmp_path / "cache" / "answers").iterdir()]) == 2
    end = asked.items[0].asks[0].answer.tolist()[2]  # an end token ends it, and is a part of it
    monkeypatch.setattr(generation, "eos_token_id", [0, end])
    again = greedy_of(loaded, 5)(asked.items[0].context).tolist()
    assert again == asked.items[0].asks[0].answer.tolist()[: again.index(end) + 1]
    long = written(tmp_path, "long.jsonl", json.dumps({"prompt": "x" * 600}))
    with pytest.raises(KvsearchError, match="601 tokens, and the model's positions reach 512"):
        items_of(loaded, "long", read(long), "agnostic", greedy_of(loaded, 6))


# -- the command -------------------------------------------------------------------------------


def test_eval_on_a_task_and_on_ones_own_prompts(
    tiny_folder: Path, prose: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvsearch.models.disk_cache.cache_folder", lambda: tmp_path / "cache")
    rows = [{"context": f"{i} " * 90, "question": "Which?", "answer_prefix": " It is",
             "answer": [str(i), "x"], "task": "mine_1", "max_new_tokens": 5}
            for i in range(4)]  # fmt: skip
    file = written(tmp_path, "mine.jsonl", "\n".join(map(json.dumps, rows)))
    out = tmp_path / "results"
    argv = ["eval", "h2o", "snapkv-prompt", "--budget", "64", "--model", str(tiny_folder),
            "--text", str(prose), "--task", "needle,tokens=300", "--items", "3",
            "--prompts", str(file), "--quiet", "--kvpress-out", str(out)]  # fmt: skip
    assert exit_code(*argv, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert [(w["name"], w["items"], w["asks"], w["see"]) for w in document["workloads"]] == [
        ("needle,tokens=300", 3, 3, "agnostic"), ("mine.jsonl", 4, 4, "agnostic"),
    ]  # fmt: skip
    for row in document["results"]:
        assert row["bytes_prompt"] <= row["bytes_peak"] and row["within_budget"]
        assert row["bytes_resident"] <= row["bytes_peak"]
    same = evaluate_prompts(
        ["h2o"], str(tiny_folder), tasks=["needle,tokens=300"], items=3, budget_slots=64,
        text=Text(prose.read_text()),
    )  # fmt: skip
    assert same.rows[0].nll == pytest.approx(document["results"][0]["nll"], abs=1e-6)

    # answers in the form of kvpress
    folders = [Path(f) for f in document["folders"]]
    # on the needles snapkv-prompt has one slot too few
    assert len(folders) == 5 and all(f.parent == out for f in folders)
    model = str(tiny_folder).replace("/", "--")
    full = out / f"mine__{model}__full__0.00"
    assert full in folders and (out / f"needle__300__{model}__full__0.00") in folders
    found = list(csv.DictReader((full / "predictions.csv").open()))
    assert [r["task"] for r in found] == ["mine_1"] * 4
    assert found[1]["question"] == "Which?" and found[1]["answer_prefix"] == " It is"
    assert found[1]["answer"] == "['1', 'x']" and found[1]["max_new_tokens"] == "5"
    loaded = load_model(str(tiny_folder), announce=lambda _: None)
    ids_ = loaded.tokenizer(f"{'1 ' * 90}Which? It is", return_tensors="pt")["input_ids"]
    said = loaded.model.generate(ids_, max_new_tokens=5, do_sample=False, pad_token_id=0)
    text = loaded.tokenizer.decode(said[0, ids_.shape[1] :], skip_special_tokens=True)
    assert found[1]["predicted_answer"] == text
    config = yaml.safe_load((full / "config.yaml").read_text())
    assert config["press_name"] == "full" and config["query_aware"] is False
    assert json.loads((full / "metrics.json").read_text()).keys() == {"mine_1"}

    assert exit_code(*argv) == 0
    table = capsys.readouterr().out
    assert "needle,tokens=300, question-agnostic: 3 answers on 3 contexts" in table
    assert "NOT USABLE" in table  # a random model cannot do it
    (h2o,) = [f for f in folders if f.name.startswith(f"mine__{model}__h2o__0.")]
    assert f"{h2o}/1\n" in table
    for more, told in (
        (["--kvpress-out", str(out)], "--kvpress-out is for answers to prompts"),
        (["--task", "needle", "--windows", "2"], "--windows is for a text"),
    ):
        assert exit_code("eval", "h2o", "--budget", "64", *more) == 2
        assert told in capsys.readouterr().err


def test_the_score_of_ruler_counts_references() -> None:
    rows = [
        {"task": "vt", "predicted_answer": "ABC\x00DE", "answer": ["abcd", "XY"]},
        {"task": "vt", "predicted_answer": "abcd xy", "answer": ["ABCD", "xy"]},
        {"task": "qa_1", "predicted_answer": "so it is b", "answer": ["a", "B"]},
    ]
    want = {"vt": {"string_match": 75.0}, "qa_1": {"string_match": 100.0}}
    assert string_match(rows, every=True) == want
    assert string_match(rows, every=False)["vt"] == {"string_match": 100.0}
