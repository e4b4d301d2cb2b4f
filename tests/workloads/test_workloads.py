"""Prompts from files and of the hub, and `kvsearch eval` on prompts and tasks."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvsearch import evaluate
from kvsearch.commands.kvpress_results import string_match
from kvsearch.errors import KvsearchError
from kvsearch.evaluation.answers import answers, greedy_of
from kvsearch.evaluation.evaluator import Evaluator
from kvsearch.models.load import LoadedModel, load_model
from kvsearch.policy import Policy
from kvsearch.workloads.items import ids
from kvsearch.workloads.prompts.encode import items_of
from kvsearch.workloads.prompts.files import Turn, read
from kvsearch.workloads.text import Text
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
        ("a.jsonl", '{"context": "x", "prompt": "Who?", "answer": "c"}', "field prompt is not"),
        ("a.jsonl", '{"instruction": "Do", "input": "x", "output": "y"}',
         "line 1: field instruction is not read beside the other fields"),
        ("a.jsonl", '{"context": "x", "input": "Which?", "answer": "c", "options": ["left", "up"]}',
         "field options is not read"),
        ("a.jsonl", '{"messages": [{"role": "user", "content": "x"}], "functions": [{"a": "w"}]}',
         "field functions is not read"),
        ("a.jsonl", '{"prompt": "x", "id": "7", "final": "y"}', "no answer is given, and field "),
        ("a.jsonl", '{"prompt": "x", "gold_label": 2}', "and field 'gold_label'"),
        ("a.jsonl", '{"context": "x", "ask": "y", "answer": "z"}', "no question is given"),
        ("a.jsonl", '{"prompt": "x", "output": "y", "target": "z"}',
         "fields output and target may both be the answer"),
        ("a.jsonl", '{"prompt": "x", "Prompt": "y"}', "field prompt is given twice, as 'Prompt'"),
        ("a.jsonl", '{"prompt": "x", "prompt": "y"}', "field 'prompt' is given twice"),
        ("a.csv", "prompt,answer,answer\na,b,c\n", "line 1: two columns are called 'answer'"),
        ("a.csv", "prompt,answer\na,\"['b' ... 'c']\"\n", "field answer: \"['b' ... 'c']\" looks"),
        ("a.csv", "prompt,answer\na,[3 4]\n", "line 2: field answer: '[3 4]' looks like a list"),
        ("a.csv", "prompt,answer\na,[]\n", "field answer: an answer is empty"),
        ("a.csv", "prompt,answer\na,\"['b\nc' 'd']\"\n", "looks like a list and is none"),
        ("a.jsonl", '{"prompt": "x", "answer": 7.0}', "line 1: field answer: 7.0 can be"),
        ("a.jsonl", '{"prompt": "x", "answer": true}', "field answer: True can be written in two"),
        ("a.jsonl", '{"prompt": "x", "answer": "y", "answer_prefix": ["z"]}',
         "field answer_prefix: give a text"),
        ("a.jsonl", '{"context": "x", "question": "y", "answer": "z", "options": [3, 4]}',
         "field options is not read"),
        ("a.jsonl", '{"context": "x", "questions": [{"question": "y", "choices": ["v"]}]}',
         "field choices is not read"),
        ("a.jsonl", '{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", '
                    '"content": "y"}], "answer": "z"}', "field answer: the messages end in an"),
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


NAN = float("nan")
ANN, BOTH = ("It is Ann.", "Who?", "Ann"), ("It is Ann.", "", "Ann")
FIELDS: dict[str, tuple[dict[str, Any], tuple[str, str, str | None]]] = {
    "LongBench": ({"input": "Who?", "context": "It is Ann.", "answers": ["Ann", "A."],
                   "length": 9, "dataset": "qasper", "all_classes": None, "_id": "1"}, ANN),
    "LongBench without a question": ({"input": "", "context": "It is Ann.", "answers": ["Ann"],
                                      "language": "en"}, BOTH),
    "InfiniteBench": ({"id": 0, "context": "It is Ann.", "input": "Who?", "answer": ["Ann"],
                       "options": []}, ANN),
    "RULER": ({"index": 1, "input": "It is Ann.", "outputs": ["Ann"], "length": 7}, BOTH),
    "SQuAD": ({"id": "5", "title": "A", "context": "It is Ann.", "question": "Who?",
               "answers": {"text": ["Ann"], "answer_start": [6]}}, ANN),
    "query": ({"context": "It is Ann.", "query": "Who?", "expected_answer": "Ann"}, ANN),
    "heads of a table": ({"Context": "It is Ann.", " Question ": "Who?", "ANSWER": "Ann"}, ANN),
    "completion": ({"prompt": "It is Ann.", "completion": "Ann"}, BOTH),
    "response": ({"prompt": "It is Ann.", "response": "Ann", "model": "m", "prompt_id": "x"}, BOTH),
    "a model's own answer": ({"prompt": "It is Ann.", "output": "Bob", "answer": "Ann"}, BOTH),
    "choices in the question": ({"context": "It is Ann.", "question": "Who? Ann Bob",
                                 "choices": ["Ann", "Bob"], "answer": "Ann"},
                                ("It is Ann.", "Who? Ann Bob", "Ann")),
    "NaN": ({"prompt": "It is Ann.", "context": NAN, "messages": NAN, "answer": NAN,
             "max_new_tokens": NAN}, ("It is Ann.", "", None)),
    "NaN beside others": ({"context": "It is Ann.", "question": "Who?", "input": NAN,
                           "answer_prefix": NAN, "answers": NAN, "answer": "Ann"}, ANN),
    "NaN in a list": ({"prompt": "It is Ann.", "answers": [NAN, "Ann"]}, BOTH),
    "a list of NaN": ({"prompt": "It is Ann.", "answer": [NAN]}, ("It is Ann.", "", None)),
    "questions of SQuAD's articles": (
        {"context": "It is Ann.", "questions": [
            {"id": "5", "question": "Who?", "answers": {"text": ["Ann", "A."]}}]}, ANN),
    "a question with a prefix": (
        {"context": "It is Ann.", "questions": [
            {"question": "Wh", "answer_prefix": "o?", "answer": "Ann"}]}, ANN),
    "the answer twice": ({"prompt": "It is Ann.", "answer": ["Ann"], "output": "Ann"}, BOTH),
    "a prefix of a prompt": ({"prompt": "It is Ann.", "answer_prefix": "So", "answer": "Ann"},
                             ("It is Ann.", "So", "Ann")),
}  # fmt: skip


@pytest.mark.parametrize("name", FIELDS)
def test_fields_of_other_tools_and_missing_values(name: str, tmp_path: Path) -> None:
    row, want = FIELDS[name]
    (record,) = read(written(tmp_path, "a.jsonl", json.dumps(row)))
    (turn,) = record.turns
    assert (record.context, turn.question, turn.answer) == want


def test_lists_in_cells_are_those_of_parquet(tmp_path: Path) -> None:
    """As `datasets`, pandas and people write them: without commas, over several lines, NaN."""
    import numpy as np
    import pandas as pd

    rows = [
        {"context": "a", "questions": ["Who is it?", 'It\'s "where"?'], "answers": ["Ann", "x, y"]},
        {"context": "b", "questions": ["word " * 30] * 9, "answers": ["a\nb", "\\"] * 4 + [None]},
        {"context": "c", "questions": ["one"], "answers": ["first"]},
    ]
    pd.DataFrame(rows).to_parquet(tmp_path / "a.parquet")
    want = read(tmp_path / "a.parquet")
    assert [len(r.turns) for r in want] == [2, 9, 1] and want[1].answers.count(None) == 1
    frame = pd.read_parquet(tmp_path / "a.parquet")
    assert "['Ann' 'x, y']" in frame.to_csv()
    frame.to_csv(tmp_path / "numpy.csv")
    pd.DataFrame(rows).to_csv(tmp_path / "python.csv")
    spaced = frame.map(lambda x: str(x).replace("None", "nan") if isinstance(x, np.ndarray) else x)
    spaced.to_csv(tmp_path / "nan.csv", index=False)
    for name in ("numpy", "python", "nan"):
        assert [r.turns for r in read(tmp_path / f"{name}.csv")] == [r.turns for r in want]
    cells = 'prompt, answer, note\nIt is, "Ann, a", x\nThis, nan, y\n'
    found = read(written(tmp_path, "people.csv", cells))
    assert [(r.context, *r.answers) for r in found] == [("It is", "Ann, a"), ("This", None)]


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


def test_the_last_question_of_a_chat_is_asked(
    tmp_path: Path, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded.tokenizer, "chat_template", TEMPLATE)
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"},
            {"role": "user", "content": "and?"}]  # fmt: skip
    bye: tuple[Any, ...] = ("bye", ["bye"], [{"role": "assistant", "content": "bye"}])
    rows = [{"messages": said}, *({"messages": said, "completion": x} for x in bye)]
    rows += [{"messages": said, "max_new_tokens": 2}]
    items = [
        items_of(loaded, "chat", read(written(tmp_path, "chat.jsonl", json.dumps(row))), "agnostic",
                 lambda _, most=1: ids([1] * most)).items[0]
        for row in rows
    ]  # fmt: skip
    text = loaded.tokenizer.decode
    asked = [[text(a.question) + "|" + text(a.answer) for a in item.asks] for item in items]
    turn = "<user>and?\n<assistant>|"
    assert asked == [["|hello\n", turn + text([1])], *3 * [["|hello\n", turn + "bye\n"]],
                     ["|hello\n", turn + text([1, 1])]]  # fmt: skip


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


def test_eval_on_a_text_a_task_and_ones_own_prompts(
    tiny_folder: Path, prose: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvsearch.models.disk_cache.cache_folder", lambda: tmp_path / "cache")
    rows = [{"context": f"{i} " * 90, "question": "Which?", "answer_prefix": " It is",
             "answer": [str(i), "x"], "task": "mine_1", "max_new_tokens": 5}
            for i in range(4)]  # fmt: skip
    file = written(tmp_path, "mine.jsonl", "\n".join(map(json.dumps, rows)))
    out = tmp_path / "results"
    argv = ["eval", "h2o", "snapkv-prompt", "--budget", "64", "--model", str(tiny_folder),
            "--text", str(prose), "--context", "128", "--task", "needle,tokens=300", "--items", "3",
            "--prompts", str(file), "--quiet", "--kvpress-out", str(out)]  # fmt: skip
    assert exit_code(*argv, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert [(w["name"], w["items"], w["scored"], w["see"]) for w in document["workloads"]] == [
        ("text", 1, 128 - 64, None), ("needle,tokens=300", 3, 3, "agnostic"),
        ("mine.jsonl", 4, 4, "agnostic"),
    ]  # fmt: skip
    on_text, *on_prompts = document["results"]
    assert on_text["policy"] == "h2o" and on_text["lost"] is None and on_text["ppl"] > 1
    refused = document["left_out"]["snapkv-prompt"]  # neither is it given a prompt, nor one slot
    assert refused.startswith("text: ") and "; needle,tokens=300: budget too small" in refused
    for row in on_prompts:
        assert row["bytes_prompt"] <= row["bytes_peak"] and row["within_budget"]
        assert row["bytes_resident"] <= row["bytes_peak"] and row["ppl"] is None
    how: dict[str, Any] = {"budget_slots": 64, "text": Text(prose.read_text()), "context": 128}
    alone = evaluate(["h2o"], str(tiny_folder), **how)
    both = evaluate(["h2o"], str(tiny_folder), tasks=["needle,tokens=300"], items=3, **how)
    assert [r.workload for r in both.rows] == ["text", "needle,tokens=300"]
    assert both.rows[0].nll == alone.rows[0].nll == pytest.approx(on_text["nll"], abs=1e-6)
    assert both.rows[0].dnll_full == alone.rows[0].dnll_full
    assert both.rows[1].nll == pytest.approx(on_prompts[0]["nll"], abs=1e-6)

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
    assert "n = 64 tokens of" in table and "dNLL to full" in table
    assert "NOT USABLE" in table  # a random model cannot do it
    (h2o,) = [f for f in folders if f.name.startswith(f"mine__{model}__h2o__0.")]
    assert f"{h2o}/1\n" in table
    for more, told in (
        (["--kvpress-out", str(out)], "--kvpress-out is for answers to prompts"),
        (["--task", "needle", "--windows", "2"], "--windows is for a text"),
    ):
        assert exit_code("eval", "h2o", "--budget", "64", *more) == 2
        assert told in capsys.readouterr().err


def test_references_that_the_full_cache_gives_are_counted(
    tiny_folder: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvsearch.models.disk_cache.cache_folder", lambda: tmp_path / "cache")
    rows = [{"prompt": f"{i} " * 40, "answer": NAN if i else "a"} for i in range(3)]
    file = written(tmp_path, "mine.jsonl", "\n".join(map(json.dumps, rows)))
    assert exit_code("eval", "full", "--model", tiny_folder, "--prompts", file) == 0
    out, err = capsys.readouterr()
    assert "mine.jsonl: the full cache's own answers are the references for 2 of 3" in err
    assert "3 answers on 3 contexts, 2 of them the full cache's own" in out


def test_two_workloads_of_one_name_are_refused_before_a_model_is_loaded(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvsearch.session.load.load_model", None)
    for folder in "ab":
        (tmp_path / folder).mkdir()
        written(tmp_path / folder, "test.jsonl", '{"prompt": "x", "answer": "y"}')
    files = ["--prompts", tmp_path / "a/test.jsonl", "--prompts", tmp_path / "b/test.jsonl"]
    tasks = ["--task", "needle", "--task", "needle"]
    for command in (["eval", "full"], ["run", "--budget", "64"]):
        for twice, said in ((files, "called test.jsonl; rename"), (tasks, "called needle; leave")):
            assert exit_code(*command, *twice) == 2
            assert said in capsys.readouterr().err


def test_the_score_of_ruler_counts_references() -> None:
    rows = [
        {"task": "vt", "predicted_answer": "ABC\x00DE", "answer": ["abcd", "XY"]},
        {"task": "vt", "predicted_answer": "abcd xy", "answer": ["ABCD", "xy"]},
        {"task": "qa_1", "predicted_answer": "so it is b", "answer": ["a", "B"]},
    ]
    want = {"vt": {"string_match": 75.0}, "qa_1": {"string_match": 100.0}}
    assert string_match(rows, every=True) == want
    assert string_match(rows, every=False)["vt"] == {"string_match": 100.0}
