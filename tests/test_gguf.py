"""GGUF files with de-quantised weights, for engines that read nothing else."""

from pathlib import Path
from typing import Literal

import gguf
import numpy as np
import pytest

from kvsearch.errors import ModelError
from kvsearch.models import disk_cache
from kvsearch.models import gguf as ours
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
