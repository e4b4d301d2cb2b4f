"""`kvsearch eval` where the answer depends on more than the text: layer sensitivity and prompts."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvsearch import Policy, Text, evaluate, load_model
from kvsearch.app.sensitivity import read
from kvsearch.cli import main
from kvsearch.errors import KvsearchError
from kvsearch.models import disk_cache
from kvsearch.policy import ModelShape
from kvsearch.report.terminal import results_table
from kvsearch.text import Source, beside, tokenize, windows
from tests.heads import losses

WORDS = Text(" ".join(str(i * i) for i in range(700)), "squares")
SIZE = dict(budget_slots=160, context=400)


@pytest.fixture(scope="module")
def loaded(tiny_folder: Path) -> Any:
    return load_model(str(tiny_folder), announce=lambda _: None)


def test_layer_sensitivity_is_measured_beside_the_windows_or_read(
    loaded: Any, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_cache, "cache_folder", lambda: tmp_path)
    names = ["rotated+sensitivity", "h2o"]
    found = evaluate(names, loaded, WORDS, progress=True, **SIZE)
    said = [line for line in capfd.readouterr().err.splitlines() if "sensitivity of each" in line]
    assert len(said) == 1 and "beside the windows" in said[0] and "--sensitivity FILE" in said[0]
    assert evaluate("h2o", loaded, WORDS, **SIZE).rows[0].nll == found.rows[1].nll
    (before,) = (tmp_path / "sensitivity").iterdir()
    file = tmp_path / "sensitivity.json"
    file.write_text(json.dumps({"per_layer": json.loads(before.read_text())}))
    before.unlink()
    again = evaluate(names, loaded, WORDS, sensitivity=file, **SIZE)
    assert again.rows[0].fingerprint == found.rows[0].fingerprint and not before.exists()
    whole = Text(WORDS.text[:500], "short")  # nothing is left beside the window
    evaluate(names, loaded, whole, progress=True, **SIZE)
    assert "on the windows themselves" in capfd.readouterr().err


HEADS = json.dumps({"per_layer": [], "heads": losses(ModelShape(3, 2, 8, 4)).plain()})


@pytest.mark.parametrize(
    "content",
    ["[]", "{", '{"per_layer": [1]}', '{"per_layer": [1, -1]}', '{"per_layer": []}', HEADS,
     '{"per_layer": [1, 2], "heads": {}}', HEADS.replace('"starved": 16', '"starved": 17')],
)  # fmt: skip
def test_a_wrong_sensitivity_file_is_one_sentence(content: str, tmp_path: Path) -> None:
    file = tmp_path / "sensitivity.json"
    file.write_text(content)
    with pytest.raises(KvsearchError, match=r"sensitivity\.json"):
        read(file, ModelShape(2, 2, 8, 4))


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
    assert found.score_from == 128 and found.tokens == 192 - 128
    assert evaluate("full", loaded, WORDS, context=192, score_from=150, prompt=128).tokens == 42
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
