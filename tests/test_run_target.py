"""`run --target`: what is found is executed, and what cannot be searched for is refused."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import kvsearch
from kvsearch.app.export import export
from kvsearch.exporters import TARGETS
from tests.command import call

NEVER = {"kvpress", "ollama", "openvino", "optuna", "vectors"}  # see docs/targets.md
SEARCHED = {*TARGETS} - NEVER


def test_a_run_finds_only_what_its_target_executes(
    tiny_folder: Path, prose: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    argv = [
        "run", "--model", str(tiny_folder), "--text", str(prose), "--budget", "96",
        "--context", "256", "--trials", "4", "--out", str(out), "--no-bench",
        "--target", "tensorrt_llm",
    ]  # fmt: skip
    code, printed, err = call(argv, capsys)
    assert code == 0 and "tensorrt_llm cannot run" in err and "best.json" in printed
    assert "--to tensorrt_llm" in (out / "report.html").read_text(encoding="utf-8")
    files = [*(out / "policies").glob("*.json"), out / "best.json"]
    assert len(files) > 2
    for policy in files:
        done = export(policy, "tensorrt_llm", tmp_path / "x", strict=True, force=True)
        assert done.bytes_given is not None  # the shape is that of the run
    for target, part in (
        ("openvino", "it evicts after a prompt"),
        ("sglang", "sglang keeps every token"),
        ("vlm", "did you mean 'vllm'"),
        ("foo", f"known are {', '.join(sorted(SEARCHED))}\n"),
        ("optuna", "unknown target 'optuna'; known are executorch, "),
        ("kvpres", "unknown target 'kvpres'; "),
    ):
        argv[-1], argv[argv.index("--out") + 1] = target, str(tmp_path / target)
        code, _, err = call(argv, capsys)
        assert code == 2 and part in err and not (tmp_path / target).exists()
        assert target in NEVER or not any(f"'{n}'" in err or f" {n}," in err for n in NEVER), err
    monkeypatch.setattr("kvsearch.app.run.inputs.model", lambda *_, **__: pytest.fail("loads"))
    for target in sorted({*TARGETS} & NEVER):
        code, _, err = call([*argv[:-1], target], capsys)
        assert code == 2 and f"--target {target}: it" in err, err
    code, _, err = call([*argv, "--space", "unified", "--target", "mlx"], capsys)
    assert code == 2 and "leave --space out" in err


@pytest.fixture(scope="module")
def wide_folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose heads are a block of llama.cpp's."""
    config = LlamaConfig.from_pretrained(tiny_folder, head_dim=32)
    folder = tmp_path_factory.mktemp("wide")
    with torch.random.fork_rng():  # the same whatever ran before
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for file in tiny_folder.glob("*token*"):
        shutil.copy(file, folder)
    return folder


def test_vllm_starts_from_its_own_cache_types(
    wide_folder: Path, prose: Path, tmp_path: Path
) -> None:
    """Those of which every token of a window fits the budget."""
    found = kvsearch.search(
        str(wide_folder), str(prose), budget_slots=129, context=256, trials=0, bench=False,
        target="vllm", out=tmp_path / "run", portfolio="none",
    )  # fmt: skip
    mine = {t.name: t for t in found.summary.trials if t.kind == "combined" and not t.policy.evicts}
    assert set(mine) == {"fp8_e4m3", "fp8_e5m2", "int4_per_token_head", "nvfp4"}
    for name, trial in mine.items():
        assert trial.state == "complete"
        done = export(
            trial.policy, "vllm", tmp_path / "x", strict=True, force=True, model=str(wide_folder)
        )
        assert done.proof == "schema" and done.document()["proof"] == "schema"
        assert f"--kv-cache-dtype {name}" in (tmp_path / "x" / "serve.sh").read_text()


def test_a_target_starts_from_what_its_users_set_by_hand(
    wide_folder: Path, prose: Path, tmp_path: Path
) -> None:
    """Without a single proposal: sinks and a window in the runtime's formats, in the budget."""
    folder = wide_folder
    found = kvsearch.search(
        str(folder), str(prose), budget_slots=96, context=256, trials=0, bench=False,
        target="llamacpp", out=tmp_path / "run",
    )  # fmt: skip
    mine = {t.name: t for t in found.summary.trials if t.name.startswith("window+k")}
    assert {"window+k8v8", "window+k5v4", "window+k4v4"} <= set(mine)
    for trial in mine.values():
        assert trial.state == "complete" and trial.kind == "combined"
        assert 0.7 * found.summary.budget_bytes < trial.bytes_peak <= found.summary.budget_bytes
        export(trial.policy, "llamacpp", tmp_path / "x", strict=True, force=True, model=str(folder))
    plain = next(t for t in found.summary.trials if t.name == "streamingllm")
    assert mine["window+k5v4"].policy.slots > 2.5 * plain.policy.slots
