"""GGUF files: de-quantised for engines that read nothing else, and the angles that they scale."""

from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.configuration_llama import LlamaConfig

from kvsearch.errors import ModelError
from kvsearch.models import disk_cache
from kvsearch.models import gguf as ours
from kvsearch.models.load import load_model
from kvsearch.models.weights import parameters


@pytest.mark.parametrize("kind", ["fp32", "fp16"])
def test_the_numbers_are_those_that_transformers_gets(
    kind: Literal["fp32", "fp16"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_cache, "cache_folder", lambda: tmp_path / "cache")
    rng = np.random.default_rng(1)
    q8 = gguf.GGMLQuantizationType.Q8_0
    matrix = gguf.quantize(rng.normal(size=(8, 64)).astype(np.float32), q8)
    vector = rng.normal(size=64).astype(np.float32)
    writer = gguf.GGUFWriter(tmp_path / "small.gguf", "llama")
    writer.add_uint32("llama.block_count", 3)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_file_type(7)
    writer.add_tensor("m", matrix, raw_dtype=q8)
    writer.add_tensor("v", vector)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    said: list[str] = []
    file = ours.dequantised(tmp_path / "small.gguf", "0" * 64, kind, said.append)
    read = gguf.GGUFReader(file)
    m, v = read.tensors
    assert (
        m.tensor_type.name == ("F32" if kind == "fp32" else "F16") and v.tensor_type.name == "F32"
    )
    exact = gguf.dequantize(matrix, q8)
    assert (np.asarray(m.data) == exact.astype(m.data.dtype)).all() and (v.data == vector).all()
    assert read.fields["general.file_type"].contents() == int(kind == "fp16")
    assert read.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
    assert read.fields["llama.block_count"].contents() == 3
    assert ours.dequantised(tmp_path / "small.gguf", "0" * 64, kind, said.append) == file
    assert len(said) == 1  # written once


@pytest.mark.parametrize("name", ["model.gguf", "m-fp16.gguf", "m-Q4_K_M.gguf"])
def test_numbers_are_counted_whatever_the_name(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_bool("a", True)
    writer.add_array("b", [["x", "yz"], ["w"]])
    writer.add_array("c", [0.5, 1.5])
    writer.add_string("d", "some words")
    writer.add_tensor("m", np.zeros((8, 64), np.float16))
    writer.add_tensor("v", np.zeros(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert parameters([file]) == 8 * 64 + 64
    file.write_bytes(file.read_bytes()[:150])
    with pytest.raises(ModelError, match="damaged or not whole"):
        parameters([file])


PAIRS, THETA, REACH = 8, 5e5, 512
SIZES: dict[str, Any] = dict(
    hidden_size=32, num_attention_heads=2, head_dim=16, max_position_embeddings=REACH,
    vocab_size=260, num_hidden_layers=1, intermediate_size=64, num_key_value_heads=1,
)  # fmt: skip
LLAMA3: dict[str, Any] = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)  # fmt: skip
ANY = np.linspace(1, 3, PAIRS, dtype=np.float32)


def expected(rope: dict[str, Any]) -> tuple[torch.Tensor, float]:
    """Angles by transformers of a config with `rope`, for rope types that depend on no length."""
    config = LlamaConfig(**SIZES, rope_parameters=dict(rope, rope_theta=THETA))
    angles, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu")
    return angles, float(factor)


def unscaled() -> torch.Tensor:
    return torch.tensor(THETA ** (-np.arange(PAIRS) / PAIRS), dtype=torch.float32)


def of_llama3() -> np.ndarray[Any, Any]:
    return (unscaled() / expected(LLAMA3)[0]).numpy().astype(np.float32)


def small(
    file: Path, keys: dict[str, Any], vectors: dict[str, Any], architecture: str = "llama"
) -> Path:
    """A model of one layer as a GGUF file, with keys of its architecture and tensors besides."""
    rng, w = np.random.default_rng(0), gguf.GGUFWriter(file, architecture)
    w.add_name("small")
    w.add_context_length(REACH)
    w.add_embedding_length(32)
    w.add_block_count(1)
    w.add_feed_forward_length(64)
    w.add_head_count(2)
    w.add_head_count_kv(1)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_rope_freq_base(THETA)
    w.add_rope_dimension_count(16)
    for key, value in keys.items():
        add = {str: w.add_string, float: w.add_float32, int: w.add_uint32, bool: w.add_bool}
        add[type(value)](f"{architecture}.{key}", value)
    w.add_tokenizer_model("gpt2")
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "<b>", "<c>", "<d>"]
    w.add_token_list(tokens)
    w.add_token_types([1] * len(tokens))
    w.add_token_merges(["a b"])
    w.add_bos_token_id(257)
    w.add_eos_token_id(258)
    shapes = {
        "token_embd": (260, 32), "output": (260, 32), "output_norm": (32,),
        "blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,), "blk.0.attn_q": (32, 32),
        "blk.0.attn_k": (16, 32), "blk.0.attn_v": (16, 32), "blk.0.attn_output": (32, 32),
        "blk.0.ffn_gate": (64, 32), "blk.0.ffn_up": (64, 32), "blk.0.ffn_down": (32, 64),
    }  # fmt: skip
    for name, shape in shapes.items():
        w.add_tensor(f"{name}.weight", rng.normal(size=shape).astype(np.float32))
    for name, vector in vectors.items():
        w.add_tensor(name, vector)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return file


YARN = {
    "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 128,
}  # fmt: skip
MADE_YARN: dict[str, Any] = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=128)
SCALED: dict[str, tuple[dict[str, Any], dict[str, Any], Any]] = {  # keys, tensors, angles
    "nothing": ({}, {}, lambda: (unscaled(), 1.0)),
    "none": (
        {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, {}, lambda: (unscaled(), 1.0),
    ),
    "llama3": ({}, {"rope_freqs.weight": of_llama3}, lambda: expected(LLAMA3)),
    "any factors": (
        {}, {"rope_freqs.weight": ANY}, lambda: (unscaled() / torch.from_numpy(ANY), 1.0),
    ),
    "any factors, linear": (
        {"rope.scaling.factor": 2.0}, {"rope_freqs.weight": ANY},
        lambda: (unscaled() / torch.from_numpy(ANY) / 2, 1.0),
    ),
    "linear": (
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {},
        lambda: (unscaled() / 4, 1.0),
    ),
    "linear of old": ({"rope.scale_linear": 4.0}, {}, lambda: (unscaled() / 4, 1.0)),
    "yarn": (YARN, {}, lambda: expected(MADE_YARN)),
    "yarn of other slopes": (
        YARN | {"rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 2.0}, {},
        lambda: expected(MADE_YARN | dict(beta_fast=16.0, beta_slow=2.0)),
    ),
    "cosines and sines": ({"rope.scaling.attn_factor": 1.5}, {}, lambda: (unscaled(), 1.5)),
    "linear, cosines and sines": (
        {"rope.scaling.factor": 4.0, "rope.scaling.attn_factor": 1.5}, {},
        lambda: (unscaled() / 4, 1.5),
    ),
    "longrope, short": (
        {"rope.scaling.original_context_length": 128, "rope.scaling.attn_factor": 1.2},
        {"rope_factors_short.weight": ANY, "rope_factors_long.weight": 2 * ANY},
        lambda: (unscaled() / torch.from_numpy(ANY), 1.2),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCALED)
def test_angles_are_those_that_the_file_says(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_cache, "cache_folder", lambda: tmp_path / "cache")
    keys, vectors, want = SCALED[name]
    made = {k: v() if callable(v) else v for k, v in vectors.items()}
    file, said = small(tmp_path / "m.gguf", keys, made), list[str]()
    angles, factor = want()
    for _ in range(2):  # converted, and from the copy
        rope = load_model(str(file), device="cpu", announce=said.append).model.model.rotary_emb
        torch.testing.assert_close(rope.inv_freq, angles, rtol=1e-5, atol=0)
        assert rope.attention_scaling == pytest.approx(factor)
    assert len(said) == 1 and "converting" in said[0]


def test_what_nothing_was_made_of_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_cache, "cache_folder", lambda: tmp_path / "cache")
    vectors = {"blk.0.attn_q.bias": ANY, "blk.0.attn_sinks": ANY, "cls.weight": ANY}
    keys = {"attention.scale": 0.5, "attention.key_length": 16, "rope.scaling.finetuned": True}
    file = small(tmp_path / "m.gguf", keys, vectors)
    for _ in range(2):  # from the copy, too
        said: list[str] = []
        load_model(str(file), device="cpu", announce=said.append)
        assert said[-1] == (
            "warning: nothing was made of llama.attention.scale, blk.*.attn_q.bias, "
            "blk.*.attn_sinks, cls.weight of m.gguf"
        )


@pytest.mark.parametrize(
    ("keys", "vectors", "part"),
    [
        (YARN, {"rope_freqs.weight": ANY}, "by yarn and otherwise too"),
        (YARN | {"rope.scaling.yarn_ext_factor": 0.5}, {}, "by yarn and otherwise too"),
        ({"rope.scaling.type": "ntk"}, {}, "by 'ntk', which kvsearch does not know"),
        ({}, {"rope_factors_long.weight": ANY}, "has one of rope_factors_short"),
        ({}, {"rope_freqs.weight": 0 * ANY}, "by zero or less"),
        (
            {"rope.scaling.factor": 4.0},
            {"rope_factors_short.weight": ANY, "rope_factors_long.weight": ANY},
            "by rope_factors_long.weight and rope.scaling.factor too",
        ),
        ({}, {"rope_freqs.weight": ANY[:5]}, "angles of 5 channel pairs, and its model has 8"),
    ],
)
def test_angles_that_cannot_be_had_are_one_sentence(
    keys: dict[str, Any], vectors: dict[str, Any], part: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(disk_cache, "cache_folder", lambda: tmp_path / "cache")
    file = small(tmp_path / "m.gguf", keys, vectors)
    with pytest.raises(ModelError, match=part) as caught:
        load_model(str(file), device="cpu", announce=lambda _: None)
    assert "\n" not in str(caught.value)
