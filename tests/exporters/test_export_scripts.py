"""Scripts of an export: what they take, print, and give the programs that they start."""

import ctypes
import os
import runpy
import subprocess
import sys
from io import BytesIO, TextIOWrapper
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from kvsearch.commands.export import export
from kvsearch.policy import ModelShape, Policy


@pytest.mark.parametrize(
    ("asked", "name"),
    [(Policy(), "transformers"), (Policy(slots=64), "transformers"), (Policy(slots=64), "mlx")],
)
def test_a_script_without_arguments_says_what_it_takes(
    asked: Policy, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = SimpleNamespace(
        generate=None, load=None, KVCache=None, QuantizedKVCache=None, RotatingKVCache=None
    )
    for module in ("mlx_lm", "mlx_lm.models", "mlx_lm.models.cache"):
        monkeypatch.setitem(sys.modules, module, fake)
    (script,) = (f for f in export(asked, name, tmp_path).files if f.suffix == ".py")
    for given in ([], ["model"], ["model", "once", "upon"]):
        monkeypatch.setattr(sys, "argv", [str(script), *given])
        with pytest.raises(SystemExit, match=rf'usage: python {script.name} MODEL "the prompt"'):
            runpy.run_path(str(script), run_name="__main__")


@pytest.mark.parametrize(
    ("pieces", "encoding", "said"),
    [
        ([bytes([b]) for b in " 你好, 🔥".encode()], "utf-8", " 你好, 🔥"),
        ([b"\xf0\x9f", b"\x94\xa5!\xea\xb1", b"\xb0"], "utf-8", "🔥!거"),
        ([b"\xff", b"a", b"\xe4\xbd"], "utf-8", "\ufffda\ufffd"),
        (["ab🔥".encode() * 40, b"."], "utf-8", "ab🔥" * 40 + "."),
        (["é🔥".encode()], "cp1252", "é\\U0001f525"),
    ],
)
def test_llamacpp_prints_characters_of_several_tokens(
    pieces: list[bytes], encoding: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def to_piece(vocab: Any, token: int, space: Any, room: int, *_: Any) -> int:
        found = pieces[token]
        if len(found) > room:
            return -len(found)
        space[: len(found)] = found
        return len(found)

    lib, out = MagicMock(ctypes=ctypes), TextIOWrapper(BytesIO(), encoding=encoding)
    lib.llama_token_to_piece = to_piece
    lib.llama_vocab_is_eog = lambda vocab, token: token == len(pieces)
    lib.llama_log_callback = lambda f: f
    monkeypatch.setitem(sys.modules, "llama_cpp", lib)
    monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", "")
    export(Policy(slots=32), "llamacpp", tmp_path)
    found = runpy.run_path(str(tmp_path / "run.py"))
    rows = iter(np.eye(len(pieces) + 1))
    monkeypatch.setattr(found["Cache"], "__init__", lambda self, *_: setattr(self, "vocab", None))
    monkeypatch.setattr(found["Cache"], "tokenize", lambda self, text: [0])
    monkeypatch.setattr(found["Cache"], "feed", lambda self, ids: next(rows)[None])
    monkeypatch.setattr(sys, "argv", ["run.py", "a.gguf", "Say:"])
    monkeypatch.setattr(sys, "stdout", out)
    found["main"]()
    out.flush()
    assert out.buffer.getvalue().decode(encoding).rstrip("\r\n") == f"Say:{said}"


@pytest.mark.parametrize(("slots", "most"), [(None, 4 + 8 + 50), (32, 32)])
def test_llamacpp_makes_room_for_what_it_generates(
    slots: int | None, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no more: 65,536 tokens of a 7B model would be 32 GiB."""
    lib, given = MagicMock(), SimpleNamespace()
    lib.llama_context_default_params.return_value = given
    lib.llama_init_from_model.return_value = None
    monkeypatch.setitem(sys.modules, "llama_cpp", lib)
    monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", "")
    export(Policy(slots=slots), "llamacpp", tmp_path)
    monkeypatch.setattr(sys, "argv", ["run.py", "a.gguf", "once", "--tokens", "50"])
    with pytest.raises(SystemExit, match="cannot make this cache"):
        runpy.run_path(str(tmp_path / "run.py"), run_name="__main__")
    assert given.n_ctx == most


@pytest.mark.skipif(os.name == "nt", reason="the scripts are for sh")
@pytest.mark.parametrize(
    ("target", "program"),
    [("vllm", "vllm"), ("sglang", "python"), ("tensorrt_llm", "trtllm-serve")],
)
def test_a_server_gets_the_hubs_name_and_what_the_user_adds(
    target: str, program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = ModelShape(layers=2, kv_heads=2, head_dim=64, heads=4)
    monkeypatch.setattr("kvsearch.commands.export.shape_named", lambda name: shape)
    (fake := tmp_path / program).write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    fake.chmod(0o755)
    eight = Policy.build(dict(tiers=[dict(key_bits=8, value_bits=8)], quantizer={"levels": "e4m3"}))
    for model, known in (("Llama3-8B", "meta-llama/Meta-Llama-3-8B"), ("./it's $5 }", None)):
        done = export(eight, target, tmp_path / "out", model=model, force=True)
        (script,) = (f for f in done.files if f.name == "serve.sh")
        for given in ((), ("mine",), ("mine", "--port", "80 81")):
            run = subprocess.run(
                [script, *given], capture_output=True, text=True, check=True,
                env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
            )  # fmt: skip
            got = run.stdout.splitlines()
            assert (given[0] if given else known or model) in got and "" not in got
            assert got[len(got) - len(given[1:]) :] == [*given[1:]]
