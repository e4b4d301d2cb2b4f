"""`kvsearch export`, `targets` and `run --target`: what they print, write and refuse."""

import json
import os
import runpy
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvsearch.commands.export import export
from kvsearch.errors import RunError
from kvsearch.evaluation.evaluator import Evaluator
from kvsearch.exporters import TARGETS, environments, find, proof
from kvsearch.exporters.target import Artefact
from kvsearch.files import require_writable, write_all
from kvsearch.models.load import load_model
from kvsearch.policy import Policy, layout
from kvsearch.rules import Critical
from kvsearch.workloads.text import read_files, tokenize, windows
from kvsearch_kernels.choose_slots import best_between
from tests.command import call

SCORED = dict(slots=48, interval=8, sinks=3, rule={"name": "attention"}, recent_window=16)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    place = tmp_path / "mine.json"
    place.write_text(Policy.build(SCORED).to_json(), encoding="utf-8")
    return place


@pytest.mark.parametrize("name", TARGETS)
def test_every_target_writes_what_it_says(
    name: str, file: Path, tiny_folder: Path, capsys: Any
) -> None:
    argv = ["export", str(file), "--to", name, "--model", str(tiny_folder), "--json"]
    code, out, err = call(argv, capsys)
    assert code == 0 and not err, err
    document = json.loads(out)
    assert document["target"] == name and {f["field"] for f in document["fields"]} >= {"slots"}
    assert all(Path(f).is_file() for f in document["files"])
    assert Path(document["files"][0]).parent == file.parent / f"mine-{name}"
    sizes = document["bytes_peak"]
    shape = load_model(str(tiny_folder)).shape
    assert sizes["asked"] == layout(Policy.build(SCORED), shape).bytes_peak(2048)
    assert sizes["given"] == layout(Policy.build(document["policy"]), shape).bytes_peak(2048)


def test_losses_of_both_policies_are_those_of_the_evaluator(
    file: Path, tiny_folder: Path, prose: Path, tmp_path: Path
) -> None:
    done = export(
        file, "llamacpp", tmp_path / "out", model=str(tiny_folder), text=str(prose), context=160
    )
    loaded = load_model(str(tiny_folder))
    ids = windows(tokenize(loaded.tokenizer, read_files((str(prose),))), count=1, length=160)
    assert done.loss is not None and done.loss.tokens == 160 - 48
    asked = Policy.build(SCORED)
    for p, found in ((asked, done.loss.asked), (done.given, done.loss.given)):
        nll = Evaluator(loaded).quality(p, ids).nll[:, 47:]
        assert found == pytest.approx(float(nll.mean()), abs=1e-5)
    assert not done.given.scored and done.loss.asked != done.loss.given
    assert done.loss.runtime is None and done.loss.agrees is None
    both = export(
        file, "llamacpp", tmp_path / "both", model=str(tiny_folder), text=str(prose), context=160,
        tasks="needle,tokens=160", items=2,
    ).answers  # fmt: skip
    assert both is not None
    assert [r.workload for r in both.rows] == ["text"] * 2 + ["needle,tokens=160"] * 2
    told = [r.nll for r in both.rows[:2]]
    assert told == pytest.approx([done.loss.asked, done.loss.given], abs=1e-6)


@pytest.mark.parametrize(
    "asked",
    [Policy.build(SCORED), Policy(), Policy.build({**SCORED, "trigger": "prompt+stream"})],
    ids=["scored", "full", "after a prompt"],
)
def test_transformers_is_run_here_and_compared(
    asked: Policy, tiny_folder: Path, prose: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = dict(
        model=str(tiny_folder), text=str(prose), context=120, prompt=32, verify=True
    )
    done = export(asked, "transformers", tmp_path / "out", **options)
    assert done.loss is not None and done.loss.agrees
    assert done.loss.ppl_off == pytest.approx(0, abs=1e-4)
    assert done.loss.tokens == 120 - max(32, asked.slots or 1)
    shape, held = load_model(str(tiny_folder)).shape, done.measured["bytes_resident"]
    if asked.evicts:
        assert held == layout(asked, shape).bytes_at(120, 32)
    monkeypatch.setattr(environments, "version_here", lambda name: "5.0.0")
    with pytest.raises(RunError, match=r"transformers 5\.0\.0 is installed, and .* speaks 5\."):
        export(asked, "transformers", tmp_path / "other", **options)


def test_an_export_to_vllm_says_what_its_prefix_caching_is_worth(
    tiny_folder: Path, tmp_path: Path
) -> None:
    """Where the plugin turns it off; vLLM's own types keep it."""
    shape, asked = load_model(str(tiny_folder)).shape, Policy.build(SCORED)
    each = layout(asked, shape).bytes_at(1000)
    done = export(asked, "vllm", tmp_path / "plugin", model=str(tiny_folder))
    assert f"prefill again, and {each / 1e6:.3g} MB of its own" in " ".join(done.notes)
    done = export(Policy(), "vllm", tmp_path / "own", model=str(tiny_folder))
    assert "prefix caching" not in " ".join(done.notes)


def test_a_runtime_that_does_something_else_is_noticed(
    file: Path, tiny_folder: Path, prose: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    right = proof.score

    def wrong(target: Any, made: Artefact, *rest: Any) -> Any:
        found = right(target, made, *rest)
        return replace(found, nll=found.nll + 0.0031)

    argv = ["export", str(file), "--model", str(tiny_folder), "--text", str(prose), "--verify"]
    argv += ["--context", "96", "--force"]
    code, out, _ = call(argv, capsys)
    assert code == 0 and "; agrees (within 0.3 %)" in out
    monkeypatch.setattr(proof, "score", wrong)
    code, out, err = call(argv, capsys)
    assert code == 2 and "; DIFFERS (not within 0.3 %)" in out
    assert "not within 0.3 %" in err.splitlines()[-1]


def test_mistakes_write_nothing(
    file: Path, tiny_folder: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cut := tmp_path / "cut.json").write_text(file.read_text(encoding="utf-8")[:60])
    (after := tmp_path / "after.json").write_text(Policy(slots=64, trigger="prompt").to_json())
    other = tmp_path / "other.json"
    weights = dict(slots=48, budgets=dict(kind="sensitivity", weights=(1, 2, 3)))
    other.write_text(Policy.build(weights).to_json(), encoding="utf-8")
    out, model = tmp_path / "out", ["--model", str(tiny_folder)]
    for argv, part in (
        ([str(cut), "--to", "vllm"], "not JSON"),
        ([str(other), "--to", "mlx", *model], "made for another shape"),
        ([str(file), "--to", "vlm"], "did you mean 'vllm'"),
        ([str(file), "--to", "sglang", "--strict", *model], "slots is dropped"),
        ([str(file), "--to", "sglang", "--verify"], "--verify cannot run sglang"),
        ([str(after), "--to", "vllm", "--verify"], "run `kvsearch verify POLICY --server URL"),
        ([str(file), "--to", "openvino", "--context", "1"], "--context must be at least 2"),
        ([str(file), "--prompt", "-5"], "--prompt -5 must be at least 0"),
        ([str(file), "--prompt", "2048"], "below the 2048 tokens of a window"),
        ([str(file), "--to", "vectors", "--prompt", "-5"], "--prompt must be at least 0, got -5"),
        ([str(file), "--to", "vectors", "--prompt", "1000000000"], "tokens is too large, 65,536"),
    ):
        code, text, err = call(["export", *argv, "-o", str(out)], capsys)
        assert (code, text) == (2, "") and part in err, err
        assert len(err.splitlines()) == 1 and not out.exists()
    monkeypatch.setattr("kvsearch.session.load.model", lambda *_, **__: pytest.fail("loads"))
    for place in (file, file / "deeper"):
        argv = ["export", str(file), "--verify", *model, "-o", str(place)]
        code, text, err = call(argv, capsys)
        assert (code, text) == (2, "") and "is a file, not a folder" in err, err


ZOO = Path(__file__).resolve().parents[2] / "docs" / "zoo" / "smollm2-135m-b256"


def test_a_converted_policy_has_no_figures(tmp_path: Path, capsys: Any) -> None:
    asked = Policy.from_json(ZOO / "policy.json")
    assert {"nll", "dnll_full", "bytes_peak", "tokens"} <= {*asked.about}
    argv = ["export", str(ZOO / "policy.json"), "--to", "kvpress", "-o", str(tmp_path), "--json"]
    code, out, _ = call(argv, capsys)
    assert code == 0 and json.loads(out)["policy"]["about"] == {"model": "smollm2-135m"}
    exact = export(asked, "transformers", tmp_path / "same")
    assert exact.given.about == asked.about


def test_a_run_folder_is_its_recommended_policy(file: Path, capsys: Any) -> None:
    run = file.parent / "run"
    run.mkdir()
    code, out, err = call(["export", str(run)], capsys)
    assert (code, out) == (2, "") and "holds no policy.json and no best.json" in err
    file.rename(run / "best.json")
    for to, made, said in (("llamacpp", "run.py", "dropped"), ("vectors", "vectors.json", "")):
        code, out, _ = call(["export", str(run), "--to", to], capsys)
        assert code == 0 and str(run / f"best-{to}" / made) in out and said in out


def test_a_mistake_shows_before_torch_is_loaded(file: Path) -> None:
    (cut := file.parent / "cut.json").write_text(file.read_text(encoding="utf-8")[:60])
    asked = (
        [str(cut)], [str(cut), "--to", "vectors"], [str(file), "--to", "vlm"], [str(file.parent)],
    )  # fmt: skip
    script = (
        f"import sys\nfrom kvsearch.cli import main\nfor argv in {asked!r}:\n"
        "    try: main(['export', *argv])\n"
        "    except SystemExit as e: print(e.code, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == 4 * "2 False\n" and done.stderr.count("kvsearch: ") == 4, done


@pytest.mark.parametrize("argv", [["export"], ["push"]], ids=" ".join)
@pytest.mark.parametrize(
    ("stop", "at"), [(OSError(28, "full"), "fsync"), (KeyboardInterrupt(), "replace")]
)
def test_a_stopped_command_leaves_nothing_and_goes_through_again(
    stop: BaseException, at: str, argv: list[str], tmp_path: Path, capsys: Any
) -> None:
    (file := tmp_path / "mine.json").write_text(Policy(slots=24, sinks=2).to_json())
    argv, out = [*argv, str(file), "-o", str(tmp_path / "new" / "out")], tmp_path / "new" / "out"
    does, calls = getattr(os, at), list[Any]()

    def second(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise stop
        does(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, at, second)
        code, said, err = call(argv, capsys)
    assert (code, said) == (2 if isinstance(stop, OSError) else 130, "")
    assert len(err.strip().splitlines()) == 1
    assert [f.name for f in tmp_path.iterdir()] == ["mine.json"]

    assert call(argv, capsys)[0] == 0
    whole = {f: f.read_bytes() for f in out.rglob("*") if f.is_file()}
    assert len(whole) >= 2
    assert call(argv, capsys)[0] == 0  # the very same content is no obstacle
    for one in whole:
        one.write_text("edited")
        code, _, err = call(argv, capsys)
        assert code == 2 and f"{one} exists; give --force" in err and one.read_text() == "edited"
        one.write_bytes(whole[one])
    next(iter(whole)).write_text("edited")
    assert call([*argv, "--force"], capsys)[0] == 0
    assert {f: f.read_bytes() for f in out.rglob("*") if f.is_file()} == whole


@pytest.mark.parametrize("at", ["fsync", "replace"])
def test_what_a_killed_process_left_is_no_obstacle(at: str, tmp_path: Path) -> None:
    files = {"a.json": "{}", "deep/b.bin": b"\0", "c": ""}
    script = (
        "import os, pathlib, signal\nfrom kvsearch.files import write_all\n"
        f"does, calls = os.{at}, []\ndef second(*args):\n"
        "    calls.append(args)\n    len(calls) == 2 and os.kill(os.getpid(), signal.SIGKILL)\n"
        f"    does(*args)\nos.{at} = second\n"
        f"write_all(pathlib.Path({str(tmp_path / 'out')!r}), {files!r})"
    )
    assert subprocess.run([sys.executable, "-c", script]).returncode == -signal.SIGKILL
    assert list(tmp_path.rglob(".*.tmp"))
    (other := tmp_path / "out" / ".c.md.01234567.tmp").write_text("of another file")
    paths = write_all(tmp_path / "out", files)
    assert {*(tmp_path / "out").rglob("*")} == {*paths, other, tmp_path / "out" / "deep"}
    assert [p.read_bytes() for p in paths] == [b"{}", b"\0", b""]


def test_a_place_that_was_tried_is_left_as_it_was(
    tiny_folder: Path, prose: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    weights = dict(slots=48, budgets=dict(kind="sensitivity", weights=(1, 2, 3)))
    (file := tmp_path / "mine.json").write_text(Policy.build(weights).to_json())
    before, out = {*tmp_path.rglob("*")}, tmp_path / "new" / "deep" / "out"
    argv = ["export", str(file), "--model", str(tiny_folder), "--text", str(prose)]
    argv += ["--context", "96", "-o", str(out)]
    code, _, err = call(argv, capsys)
    assert code == 2 and "made for another shape" in err and {*tmp_path.rglob("*")} == before
    does, calls = Path.unlink, list[Path]()

    def interrupted(path: Path, missing_ok: bool = False) -> None:
        calls.append(path)
        if len(calls) == 1:
            raise KeyboardInterrupt
        does(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", interrupted)
    with pytest.raises(KeyboardInterrupt):
        require_writable(tmp_path / "nll.parquet")
    assert calls and {*tmp_path.rglob("*")} == before


def test_a_method_is_exported_by_its_name_as_it_is_measured(
    tmp_path: Path, tiny_folder: Path, prose: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    sized = ["--model", str(tiny_folder), "--budget", "48", "--context", "256", "--json"]
    code, out, err = call(["export", "tova", *sized], capsys)
    assert code == 0, err
    assert (tmp_path / "tova-transformers" / "policy.json").is_file()
    wrote = Policy.from_json(tmp_path / "tova-transformers" / "policy.json")
    code, out, err = call(["eval", "tova", "--text", str(prose), *sized], capsys)
    (row,) = json.loads(out)["results"]
    assert row["fingerprint"] == wrote.fingerprint(load_model(str(tiny_folder)).shape.layers)

    for argv, why in (
        (["h2o"], "method h2o needs a size"),
        (["h2o", "--budget", "48"], "method h2o is sized for a model: give --model"),
        (["h2", "--budget", "48"], "did you mean 'h2o'"),
        (["rotated+heads", *sized], "export the policy of a run"),
        (["tova-transformers", *sized], "--budget sizes a named method"),
    ):
        code, _, err = call(["export", *argv], capsys)
        assert code == 2 and why in err, (argv, err)


def test_strict_takes_what_is_exact(file: Path, tmp_path: Path) -> None:
    critical = Policy(slots=64, rule=Critical())  # no server's layers serve its rule
    for asked, to in ((file, "llamacpp"), (critical, "vllm")):
        with pytest.raises(RunError, match=rf"--strict: for {to} .*rule is dropped"):
            export(asked, to, tmp_path / "a", strict=True)
    given = export(file, "llamacpp", tmp_path / "b").given
    done = export(given, "llamacpp", tmp_path / "c", strict=True)
    assert {v.verdict for v in done.verdicts} == {"exact"}


def test_a_full_cache_needs_nothing_of_ours(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    export(Policy(), "transformers", tmp_path)
    script = tmp_path / "generate.py"
    assert "kvsearch" not in script.read_text(encoding="utf-8")
    monkeypatch.setattr(sys, "argv", [str(script), str(tiny_folder), "once upon"])
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out.startswith("once upon")


def test_targets_are_listed(capsys: Any) -> None:
    code, out, _ = call(["targets", "--json"], capsys)
    found = {t["name"]: t for t in json.loads(out)}
    assert code == 0 and list(found) == list(TARGETS)
    assert found["transformers"]["installed"] and found["llamacpp"]["verify"]
    code, out, _ = call(["targets"], capsys)
    assert code == 0 and all(name in out for name in TARGETS)
    code, _, err = call(["targets", "--install", "sglang"], capsys)
    assert code == 2 and "no environment" in err


def test_a_runtime_of_another_version_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target = find("llamacpp")
    monkeypatch.setattr(environments, "cache_folder", lambda: tmp_path)
    with pytest.raises(
        RunError, match="is not installed; run `kvsearch targets --install llamacpp"
    ):
        environments.require(target)
    python = environments.python_of(target)
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho 0.1.2\n")
    python.chmod(0o755)
    with pytest.raises(RunError, match=r"holds llama-cpp-python 0\.1\.2, and .* speaks 0\.3"):
        environments.require(target)


def test_the_script_of_a_proof_is_run_and_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_folder: Path
) -> None:
    target = find("llamacpp")
    monkeypatch.setattr(proof, "require", lambda target: Path(sys.executable))
    monkeypatch.setattr(proof, "gguf_in", lambda kind, name: tmp_path / f"{kind}.gguf")
    script = (
        "import json, sys\n"
        "ids = json.load(open(sys.argv[3]))\n"
        "nll = [[float(x) for x in row[1:]] for row in ids]\n"
        "json.dump({'nll': nll, 'cells': 7}, open(sys.argv[5], 'w'))\n"
    )
    ids = np.arange(6).reshape(1, 6)
    found = proof.run(target, Artefact({"run.py": script}), "m", ids)
    assert found.nll.tolist() == [[1, 2, 3, 4, 5]] and found.measured == {"cells": 7}
    runs = "import json, sys\njson.dump({'nll': None, 'generated': 9}, open(sys.argv[5], 'w'))\n"
    found = proof.run(target, Artefact({"run.py": runs}), "m", ids)
    assert found.nll is None and found.measured == {"generated": 9}
    with pytest.raises(RunError, match="ended with code 1: oh no"):
        proof.run(target, Artefact({"run.py": "raise SystemExit('oh no')"}), "m", ids)
    prompted = (  # it gets a folder and the prompt
        "import json, os, sys\n"
        "assert os.path.isfile(sys.argv[1] + '/config.json')\n"
        "at = sys.argv.index('--prompt') + 1\n"
        "json.dump({'nll': None, 'prompt': int(sys.argv[at])}, open(sys.argv[5], 'w'))\n"
    )
    for prompt, told in ((4, 4), (0, 1)):
        made = Artefact({"run.py": prompted})
        found = proof.run(find("kvpress"), made, str(tiny_folder), ids, prompt)
        assert found.measured == {"prompt": told}


def test_kvpress_keeps_time_and_tells_each_query_its_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The press of the script on a cache whose keys are numbered, beside our own choice."""
    asked = Policy.build(
        dict(slots=6, interval=1, trigger="prompt+stream", rule={"name": "key-norm"})
    )
    export(asked, "kvpress", tmp_path, strict=True)
    seen: list[Any] = []
    scores = torch.tensor([[[3, 1, 2, 2, 5, 1, 2, 0.0]]])

    class Knorm:
        def __init__(self, compression_ratio: float) -> None:
            self.compression_ratio = compression_ratio

        def score(self, *given: Any) -> torch.Tensor:
            seen.append(given[-1]["position_embeddings"])
            return scores

    fake = SimpleNamespace(KnormPress=Knorm, DecodingPress=None, PrefillDecodingPress=None)
    monkeypatch.setitem(sys.modules, "kvpress", fake)
    made = runpy.run_path(str(tmp_path / "run.py"), run_name="kvpress_script")
    keys = torch.arange(8.0)[None, None, :, None]
    module = SimpleNamespace(head_dim=1, rotary_emb=lambda hidden, at: at)
    at = {"position_ids": torch.tensor([[41]]), "position_embeddings": None}

    def press(ratio: float) -> Any:
        return made["Press"](compression_ratio=ratio).compress

    kept, _ = press(3 / 8)(module, torch.zeros(1, 3, 4), keys, keys, None, at)
    assert kept.flatten().tolist() == [0, 2, 3, 4, 6]
    fewer, _ = press(4 / 8)(module, torch.zeros(1, 3, 4), keys, keys, None, at)
    assert fewer.flatten().tolist() == [0, 3, 4, 6]  # of equals the older leaves
    assert best_between(scores, 0, 8, 4).flatten().tolist() == [0, 3, 4, 6]
    assert seen[0].tolist() == [[39, 40, 41]]
