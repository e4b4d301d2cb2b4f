"""Exports and the model that they are for: layers that no policy governs, and where it lies."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma3TextConfig

from kvsearch.commands.export import export
from kvsearch.errors import KvsearchError
from kvsearch.models.shape import shape_of
from kvsearch.policy import Policy

ROOT = Path(__file__).resolve().parents[2]
STUDY = ROOT / "studies" / "2026-11-first-command" / "records" / "built-in"


def test_layers_that_no_policy_governs_are_not_taken_for_those_that_one_does(
    tmp_path: Path,
) -> None:
    """A runtime counts all layers, and a policy only those with full attention."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    config = Gemma3TextConfig(num_hidden_layers=6, head_dim=64, layer_types=kinds)
    shape = shape_of(config)
    assert (shape.layers, shape.others) == (2, 4)
    (run := tmp_path / "run").mkdir()
    study = json.loads((STUDY / "study.json").read_text())
    study["model"] |= {"name": "gemma", "shape": shape.plain()}
    (run / "study.json").write_text(json.dumps(study))
    eight, sixteen = dict(key_bits=8, value_bits=8), dict(key_bits=16, value_bits=16)
    fp8: dict[str, Any] = dict(tiers=[eight], quantizer={"levels": "e4m3"})
    one = {**fp8, "head_tiers": dict(others=[[sixteen]], of=[0, 1])}
    pyramid = dict(slots=64, budgets=dict(kind="pyramid"))
    for name, asked, target, refused in (
        ("one", one, "vllm", True), ("one", one, "transformers", False), ("one", one, "mlx", True),
        ("pyramid", pyramid, "tensorrt_llm", True), ("pyramid", pyramid, "mlx", True),
        ("window", dict(slots=64), "vllm", True), ("window", dict(slots=64), "mlx", False),
        ("fp8", fp8, "vllm", False), ("fp8", fp8, "onnxruntime_genai", False),
        ("full", {}, "mlx", False),
    ):  # fmt: skip
        (run / f"{name}.json").write_text(Policy.build(asked).to_json())
        if refused:
            with pytest.raises(KvsearchError, match="4 of the model's 6 layers have a sliding"):
                export(run / f"{name}.json", target)
            continue
        done = export(run / f"{name}.json", target)
        noted = "4 of the model's 6 layers" in " ".join(done.document()["notes"])
        assert noted == (target != "transformers" and name != "full")
    scales = json.loads((run / "fp8-onnxruntime_genai" / "kv-scales.json").read_text())["scales"]
    assert len(scales["k_scales"]) == 6


def test_ollama_finds_a_model_that_is_named_from_here(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks for a relative path beside the Modelfile, which is written elsewhere."""
    monkeypatch.chdir(tiny_folder.parent)
    for given, known in ((tiny_folder.name, str(tiny_folder.resolve())), (None, "MODEL")):
        export(Policy(slots=64), "ollama", tmp_path, model=given, force=True)
        assert f"FROM {known}\n" in (tmp_path / "Modelfile").read_text(encoding="utf-8")
