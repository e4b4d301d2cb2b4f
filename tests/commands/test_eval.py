"""`kvsearch eval` where the answer depends on more than the text: the heads and prompts."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvsearch import Policy, Text, evaluate, load_model
from kvsearch.cli import main
from kvsearch.commands.heads import heads
from kvsearch.errors import KvsearchError, OutOfMemory
from kvsearch.model_analysis import head_losses
from kvsearch.policy import ModelShape
from kvsearch.policy_space import Setting, build
from kvsearch.policy_space.portfolio import DEFAULT, load
from kvsearch.report.terminal import results_table
from kvsearch.results.records import Interval
from kvsearch.session.policies import resolve
from kvsearch.workloads.text import Source, beside, tokenize, windows
from tests.cache_cases import OFFSET
from tests.command import call
from tests.heads import losses

WORDS = Text(" ".join(str(i * i) for i in range(700)), "squares")
SIZE = dict(budget_slots=160, context=400)


@pytest.fixture(scope="module")
def loaded(tiny_folder: Path) -> Any:
    return load_model(str(tiny_folder), announce=lambda _: None)


def test_heads_are_measured_once_kept_shared_and_read(
    loaded: Any, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_losses, "cache_folder", lambda: tmp_path)
    names = ["rotated+heads", "h2o"]
    found = evaluate(names, loaded, WORDS, progress=True, **SIZE)
    assert "rotated+heads: losses of the 4 KV heads: measured now" in capfd.readouterr().err
    (kept,) = (tmp_path / "heads").iterdir()
    before = kept.read_bytes()
    again = evaluate(names, loaded, Text(WORDS.text[900:]), progress=True, **SIZE)
    assert "kept on disk" in capfd.readouterr().err  # whatever the text
    assert again.rows[0].fingerprint == found.rows[0].fingerprint
    file = tmp_path / "heads.json"
    assert heads(loaded, out=file).text.encode() == file.read_bytes() == before
    kept.write_text("{}")  # damaged: measured again
    assert heads(loaded).where.startswith("measured") and kept.read_bytes() == before
    kept.unlink()
    evaluate(names, loaded, WORDS, heads=file, **SIZE)
    assert not kept.exists()
    evaluate(names, loaded, WORDS, measure_heads=True, **SIZE)
    assert kept.read_bytes() == before
    data = json.loads(before)
    data["model"]["digest"] = "sha256:0"
    file.write_text(json.dumps(data))
    other = evaluate(names, loaded, WORDS, heads=file, progress=True, **SIZE)
    assert "was measured on other weights" in capfd.readouterr().err
    assert other.rows[0].fingerprint == found.rows[0].fingerprint


def test_heads_are_measured_on_fewer_tokens_where_memory_is_short(
    loaded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_losses, "cache_folder", lambda: tmp_path)
    usual, asked, room = head_losses.price, list[int](), [300]

    def price(evaluator: Any, ids: Any, **how: Any) -> Any:
        asked.append(len(ids))
        if asked[-1] > room[0]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return usual(evaluator, ids, **how)

    monkeypatch.setattr(head_losses, "price", price)
    assert "on 512 tokens" in heads(loaded, measure_heads=True).where and asked == [512, 256, 256]
    room[0] = 100
    with pytest.raises(OutOfMemory, match=r"on 128 tokens: CUDA out of memory.*--heads FILE"):
        heads(loaded, measure_heads=True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("[" * 100_000, "is no file of head losses"),
        ("[1, 2]", "is no file of head losses"),
        ({"schema": "kvsearch.heads/0"}, "holds 'recall/1' as 'kvsearch.heads/0', and this kv"),
        ({"recipe": "recall/0"}, "this kvsearch reads 'recall/1'"),
        ({"losses": {"slots": [[float("nan"), 1, 1, 1]] * 4}}, "is not finite"),
        ({"losses": {"values": [[1e308] * 4] * 4}}, "is not finite"),
        ({"losses": {"bits": [4]}}, "rows of unequal length"),
        ({"losses": {"starved": 17}}, "no loss of starved heads"),
        ({"losses": losses(ModelShape(3, 2, 8, 4)).plain()}, "with 3 layers of 2 KV heads, and"),
    ],
)
def test_a_wrong_file_of_heads_is_one_sentence(
    change: Any, said: str, loaded: Any, tmp_path: Path
) -> None:
    file = tmp_path / "mine.json"
    data = json.loads(head_losses.document(loaded, losses(ModelShape(2, 2, 8, 4))))
    if isinstance(change, str):
        file.write_text(change)
    else:
        for key, value in change.items():
            data[key] = {**data[key], **value} if isinstance(value, dict) else value
        file.write_text(json.dumps(data))
    with pytest.raises(KvsearchError, match=said) as error:
        head_losses.read(file, loaded)
    assert "\n" not in str(error.value) and str(file) in str(error.value)


def test_beside_shares_no_token_with_the_windows(tiny_tokenizer: Any) -> None:
    tokens = tokenize(tiny_tokenizer, Source.of("n", WORDS.text, ""))
    rest = beside(tokens, count=3, length=192)
    rows = [bytes(row.astype(np.uint8)) for row in windows(tokens, count=3, length=192)]
    text = bytes(tokens.ids.astype(np.uint8))
    inside = [(text.index(row), text.index(row) + 192) for row in rows]
    begin = text.index(bytes(rest.ids.astype(np.uint8)))
    assert rest.ids.size > 300
    assert all(begin + rest.ids.size <= a or begin >= b for a, b in inside)


def test_a_prompt_is_not_scored(loaded: Any) -> None:
    prompted = Policy(slots=30, sinks=4, trigger="prompt", name="prompted")
    found = evaluate(prompted, loaded, WORDS, context=192, score_from=20, prompt=128)
    assert found.workloads[0].score_from == 128 and found.workloads[0].scored == 192 - 128
    later = evaluate("full", loaded, WORDS, context=192, score_from=150, prompt=128)
    assert later.workloads[0].scored == 42
    with pytest.raises(KvsearchError, match="prompt"):
        evaluate(prompted, loaded, WORDS, context=192)
    with pytest.raises(KvsearchError, match="none is given"):  # not: the budget is too small
        evaluate("snapkv-prompt", loaded, WORDS, context=192, budget_slots=64)


def test_methods_that_cannot_run_are_left_out_and_named(loaded: Any) -> None:
    found = evaluate(["h2o", "xmu"], loaded, WORDS, context=192, budget_slots=64)
    assert [row.policy for row in found.rows] == ["h2o"]
    assert found.left_out["xmu"].startswith("budget too small: field slots")
    assert "\nleft out: xmu: budget too small: field slots" in results_table(found.document())
    with pytest.raises(KvsearchError, match=r"^xmu: budget too small: field slots"):
        evaluate(["xmu", "snapkv-prompt"], loaded, WORDS, context=192, budget_slots=64)


def test_a_policy_of_ones_own_that_cannot_run_is_named(loaded: Any) -> None:
    far = Policy(slots=64, budgets={"kind": "sensitivity", "weights": (1.0,) * 9}, name="far")
    with pytest.raises(KvsearchError, match=r"^far: field budgets\.weights: 9 layers"):
        evaluate(["h2o", far], loaded, WORDS, context=192, budget_slots=64)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--prompt", "192"], "below the 192 tokens"),
        (["--prompt", "-1"], "at least 0"),
        (["--prompt", "600", "--context", "700"], "positions reach 512 tokens"),
    ],
)
def test_a_prompt_that_does_not_fit_is_refused_before_weights(
    options: list[str], said: str, tiny_folder: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvsearch.models.load.read", None)  # nothing may get that far
    argv = ["eval", "full", "--model", str(tiny_folder), "--context", "192", *options]
    with pytest.raises(SystemExit) as done:
        main(argv)
    out, err = capsys.readouterr()
    assert done.value.code == 2 and said in err and out == "" and err.count("\n") == 1


@pytest.mark.parametrize(("lost", "exits"), [(0.02, 0), (0.2, 3), (float("nan"), 3)])
def test_a_policy_that_loses_more_than_allowed_fails_a_pipeline(
    lost: float, exits: int, loaded: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    found = evaluate("h2o", loaded, WORDS, **SIZE)
    (row,) = found.rows
    row = replace(row, dnll_full=Interval(lost, lost - 0.01, lost + 0.01))
    fixed = replace(found, rows=[row, replace(row, workload="needle", lost=Interval(0.01, 0, 0.1))])
    monkeypatch.setattr("kvsearch.commands.evaluate.evaluate", lambda *_, **__: fixed)
    code, out, err = call(["eval", "h2o", "--max-drop", "5", "--json"], capsys)
    assert code == exits and json.loads(out)["results"]
    assert ("h2o loses" in err and "of perplexity on text: more than 5 %" in err) == bool(exits)
    assert "needle" not in err and call(["eval", "h2o"], capsys)[0] == 0


def test_names_of_starting_points_are_those_that_a_search_begins_with() -> None:
    """Sized as any method, and stored without what keys share where that is in the setting."""
    shape = ModelShape(4, 2, 16, 6)
    setting = Setting(shape, shape.budget_bytes(104), 400, heads=losses(shape))
    points = load(DEFAULT)
    assert len(points) >= 5
    for name, point in points.items():
        (policy,) = resolve((name,), setting)
        assert policy.name == name and policy.offset is None
        assert policy.fingerprint() == build(point.knobs, setting).fingerprint()
    policy, plain = resolve((name, "h2o"), replace(setting, offset=OFFSET))
    assert policy.offset is not None and plain.offset is None
    with pytest.raises(KvsearchError, match=re.escape(f"did you mean '{name}'")):
        resolve((name[:-1],), setting)
