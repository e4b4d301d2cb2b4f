"""Whether a cache has to be smaller: bytes and requests from a configuration alone."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma3TextConfig, LlamaConfig

from kvsearch.commands.need import need
from tests.command import call

SMALL = dict(
    hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, vocab_size=97, max_position_embeddings=4096,
)  # fmt: skip
TOKEN = 3 * 2 * 2 * 2 * 16  # bytes: three layers, key and value, two heads of 16 channels
WEIGHTS = 2 * (2 * 97 * 64 + 3 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 128 + 2 * 64) + 64)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's configuration, without weights."""
    LlamaConfig(num_hidden_layers=3, **SMALL).save_pretrained(tmp_path / "m")
    return tmp_path / "m"


@pytest.mark.parametrize(
    ("rooms", "share", "said", "command"),
    [
        (4.5, 1, "You need no smaller cache: 4 requests", ""),
        (2.5, 1 / 2, "8 bits suffice for 4 requests", "kvsearch eval int8"),
        (1.01, 1 / 4, "need a cache of at most 1/4", "--context 1000 --budget 250"),
        (0.1, None, "No cache of at least 1/32", ""),
        (-0.3, None, "The weights alone do not fit", ""),
    ],
)
def test_a_verdict_follows_from_bytes(
    folder: Path, rooms: float, share: float | None, said: str, command: str, capsys: Any
) -> None:
    """`rooms` full caches of 1000 tokens fit beside the weights and a tenth of the memory."""
    memory = int((WEIGHTS + rooms * 1000 * TOKEN) / 0.9) + 1
    given = ["--model", str(folder), "--context", "1000", "--requests", "4"]
    code, out, _ = call(["need", *given, "--memory", str(memory), "--json"], capsys)
    found = json.loads(out)
    assert code == 0 and (found["weights"], found["share"]) == (WEIGHTS, share)
    assert found["fits"][0]["bytes"] == 1000 * TOKEN
    assert [f["requests"] for f in found["fits"]][:3] == [
        max(0, int(rooms * part)) for part in (1, 2, 4)
    ]  # fmt: skip
    assert said in found["verdict"] and command in found["command"]
    assert bool(command) == bool(found["command"])
    code, out, _ = call(["need", *given, "--memory", str(memory)], capsys)
    assert said in " ".join(out.split()) and f"{TOKEN} bytes a token" in out


def test_a_sliding_window_stays_as_it_is(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = Gemma3TextConfig(num_hidden_layers=3, layer_types=kinds, sliding_window=512, **SMALL)
    config.save_pretrained(tmp_path / "m")
    found = need(tmp_path / "m", context=2000)
    assert (found.shape.layers, found.windowed) == (1, 2 * 512 * TOKEN // 3)
    assert [f.bytes for f in found.fits][:2] == [
        (2000 * part + 2 * 512) * TOKEN // 3 for part in (1, 0.5)
    ]  # fmt: skip
    assert need(tmp_path / "m", context=100).windowed == 2 * 100 * TOKEN // 3


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--requests", "0"], "--requests must be at least 1"),
        (["--requests", str(10**18)], "are more than there can be"),
        (["--context", "5000"], "positions reach 4096 tokens"),
        (["--memory", "lots"], "'lots' is not a size in bytes"),
        (["--memory", "0"], "above 0 bytes"),
    ],
)
def test_bad_input_is_one_sentence(folder: Path, given: list[str], said: str, capsys: Any) -> None:
    code, out, err = call(["need", "--model", str(folder), *given], capsys)
    assert code == 2 and not out and said in err and err.count("\n") == 1


def test_an_unknown_architecture_is_one_sentence(folder: Path, capsys: Any) -> None:
    (folder / "config.json").write_text('{"model_type": "made-up"}')
    code, _, err = call(["need", "--model", str(folder)], capsys)
    assert code == 2 and "transformers cannot load" in err and err.count("\n") == 1
