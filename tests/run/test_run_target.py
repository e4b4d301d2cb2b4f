"""`run --target`: what is found is executed, and what cannot be searched for is refused."""

from pathlib import Path
from typing import Any

import pytest

from kvsearch.commands.export import export
from kvsearch.exporters import TARGETS
from kvsearch.results.journal import Journal
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
    kinds = {t.name: t.kind for t in Journal(out / "trials.jsonl").read()}
    assert kinds["window+k8v8"] == "combined"  # what its users set by hand comes first
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
    monkeypatch.setattr("kvsearch.run.run.load.model", lambda *_, **__: pytest.fail("loads"))
    for target in sorted({*TARGETS} & NEVER):
        code, _, err = call([*argv[:-1], target], capsys)
        assert code == 2 and f"--target {target}: it" in err, err
    code, _, err = call([*argv, "--space", "unified", "--target", "mlx"], capsys)
    assert code == 2 and "leave --space out" in err
