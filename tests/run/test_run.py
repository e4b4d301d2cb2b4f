"""The commands from end to end on a tiny model: what they leave, print and refuse."""

import csv
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from kvsearch.cache import PolicyCache
from kvsearch.cli import main
from kvsearch.errors import KvsearchError
from kvsearch.models import load_model
from kvsearch.options.run_config import RunConfig
from kvsearch.policy import Policy
from kvsearch.policy_space.methods import SELDOM
from kvsearch.policy_space.portfolio import load
from kvsearch.results.folder import RunFolder
from kvsearch.results.journal import Journal
from kvsearch.results.records import Trial
from kvsearch.results.study import Study
from kvsearch.run import evaluators
from kvsearch.run.run import Run
from kvsearch.run.study_document import default_folder
from kvsearch.session.progress import Shown
from tests.command import call


def run_argv(tiny_folder: Path, prose: Path, out: Path) -> list[str]:
    return [
        "run", "--model", str(tiny_folder), "--text", str(prose), "--budget", "96",
        "--context", "256", "--trials", "3", "--report-windows", "1", "--out", str(out),
        "--no-bench", "--seed", "-1",  # any whole number
    ]  # fmt: skip


# a search of which little has to be measured
FEW = ["--space", "h2o-int4", "--portfolio", "none", "--windows", "1"]


@pytest.fixture(scope="module")
def finished(tiny_folder: Path, prose: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "one"
    with pytest.raises(SystemExit) as done:
        main([*run_argv(tiny_folder, prose, out), "--quiet"])
    assert not done.value.code
    return out


def test_a_run_with_more_trials_chooses_on_more_windows(
    tiny_folder: Path, prose: Path, tmp_path: Path
) -> None:
    for trials, select in ((3, "select1"), (30, "select2")):
        options = RunConfig(
            model=str(tiny_folder), budget_slots=96, text=(str(prose),), context=256, windows=1,
            trials=trials, out=tmp_path / select,
        )  # fmt: skip
        run = Run(options, Shown(quiet=True))
        run.folder.close()
        assert run.text.select == select
        assert run.text.parts[select].beginnings.shape == (int(select[-1]), 256)


def test_a_run_leaves_everything(finished: Path) -> None:
    names = {p.name for p in finished.iterdir()}
    assert names >= {
        "study.json", "trials.jsonl", "trials.parquet", "front.csv", "pareto.html", "pareto.png",
        "report.html", "best.json", "policies", "nll", "heads.json", "measured.json",
    }  # fmt: skip
    settings = json.loads((finished / "study.json").read_text())["settings"]
    assert (settings["report_windows"], settings["headline_windows"]) == (1, 8)
    measured = json.loads((finished / "measured.json").read_text())
    mine, its = (s for s in measured["sizes"])
    assert mine["name"] == measured["recommended"] and mine["sizes"] and its["sizes"]
    assert set(settings["exclude_method"]) == set(SELDOM)
    assert f"{', '.join(SELDOM)} (not compared with" in (finished / "report.html").read_text()
    trials = Journal(finished / "trials.jsonl").read()
    assert sum(t.kind == "searched" and t.state in ("complete", "pruned") for t in trials) == 3
    points = list(load("default"))
    assert [t.kind for t in trials[: len(points) + 1]] == ["earlier"] * len(points) + ["combined"]
    assert [t.name for t in trials[: len(points) + 1]] == [*points, "h2o+int4-fine"]
    table = pq.read_table(finished / "trials.parquet")
    assert table.column_names == [f.name for f in fields(Trial)]
    assert table.num_rows == len(trials) and table.schema.field("speed").type == pa.float64()
    best = Policy.from_json(finished / "best.json")
    assert best.about["bytes_peak"] <= 96 * 2 * 2 * 2 * 8 * 2
    study = json.loads((finished / "study.json").read_text())
    assert len(study["text"]["search"]["token_sha256"]) == 64


def test_the_same_command_goes_on_and_measures_nothing_twice(
    finished: Path, tiny_folder: Path, prose: Path, capsys: Any
) -> None:
    before = {p: p.stat().st_mtime_ns for p in (finished / "nll").iterdir()}
    lines = (finished / "trials.jsonl").read_text()
    study = finished / "study.json"
    asked = json.loads(study.read_text())
    folder = default_folder(Study.model_validate(asked))
    asked["model"]["origin"] += ", now in a cache folder"  # the first time it had to be fetched
    assert default_folder(Study.model_validate(asked)) == folder
    study.write_text(json.dumps(asked))
    code, out, _ = call([*run_argv(tiny_folder, prose, finished), "--json"], capsys)
    assert code == 0
    document = json.loads(out)
    assert document["recommended"] and len(document["rows"]) >= 10
    assert document["resumed"]  # so its seconds are not those of the whole run
    assert "the run was resumed, and took" in (finished / "report.html").read_text()
    assert before == {p: p.stat().st_mtime_ns for p in (finished / "nll").iterdir()}
    assert asked["options"]["bench"] is False and "dtype" not in asked["options"]
    assert call(["run", "--config", str(study), "--quiet"], capsys)[0] == 0
    assert (finished / "trials.jsonl").read_text() == lines


def test_a_killed_run_ends_like_an_uninterrupted_one(
    tiny_folder: Path, prose: Path, tmp_path: Path, capsys: Any
) -> None:
    out, whole = tmp_path / "killed", tmp_path / "whole"
    argv, alike = ([*run_argv(tiny_folder, prose, x), *FEW, "--quiet"] for x in (out, whole))
    child = subprocess.Popen([sys.executable, "-m", "kvsearch", *argv], stdout=subprocess.DEVNULL)
    file = out / "trials.jsonl"
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and (not file.exists() or file.read_text().count("\n") < 4):
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    child.wait()
    with file.open("ab") as f:
        f.write(b'{"number": 7, "na')  # a line that the kill tore
    assert call(argv, capsys)[0] == call(alike, capsys)[0] == 0

    def trials(folder: Path) -> list[tuple[Any, ...]]:
        found = Journal(folder / "trials.jsonl").read()
        return [(t.number, t.name, t.state, t.fingerprint, t.nll) for t in found]

    assert trials(out) == trials(whole)
    assert (out / "trials.torn").read_bytes() == b'{"number": 7, "na'


def test_report_is_rebuilt_from_the_records(finished: Path, capsys: Any) -> None:
    page, table = (finished / "report.html").read_bytes(), (finished / "front.csv").read_bytes()
    (finished / "report.html").unlink()
    (finished / "front.csv").unlink()
    code, out, _ = call(["report", str(finished)], capsys)
    assert code == 0 and "recommended" in out
    assert (finished / "front.csv").read_bytes() == table
    assert (finished / "report.html").read_bytes() == page


def test_eval_prints_one_document_and_keeps_every_token(
    tiny_folder: Path, prose: Path, tmp_path: Path, capsys: Any
) -> None:
    mine = tmp_path / "mine.json"
    mine.write_text(Policy(slots=40, sinks=4).to_json())
    parquet = tmp_path / "nll.parquet"
    code, out, _ = call(
        ["eval", "h2o", "xmu", str(mine), "--model", str(tiny_folder), "--text", str(prose),
         "--budget", "96", "--tokens", "512", "--context", "256", "--nll-out", str(parquet),
         "--json"],
        capsys,
    )  # fmt: skip
    assert code == 0
    document = json.loads(out)
    assert document["workloads"][0]["scored"] == 2 * (256 - 96)
    for result in document["results"]:
        assert result["bytes_asked"] == result["bytes_resident"] <= result["bytes_peak"]
        assert result["dnll_full"]["lo"] <= result["dnll_full"]["mean"]
    table = pq.read_table(parquet)
    assert table.column_names == ["policy", "window", "pos", "token", "nll"]
    assert table.num_rows == 3 * 2 * 255
    h2o = table.filter([p == "h2o" for p in table["policy"].to_pylist()]).to_pandas()
    assert h2o[h2o.pos >= 96].nll.mean() == pytest.approx(document["results"][0]["nll"], abs=1e-5)


def test_bench_export_and_validate(
    finished: Path, tiny_folder: Path, prose: Path, tmp_path: Path, capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    best = str(finished / "best.json")
    policy, model = Policy.from_json(best), load_model(str(tiny_folder)).model
    cache, ids = PolicyCache.from_json(best, model), torch.arange(256)[None]
    model.generate(ids[:, :216], past_key_values=cache, max_new_tokens=41, min_new_tokens=41)
    with (finished / "front.csv").open() as lines:
        (row,) = [r for r in csv.DictReader(lines) if r["name"] == policy.name]
    assert cache.get_seq_length() == 256 and cache.bytes_resident == int(row["bytes_resident"])
    assert cache.bytes_resident <= int(row["bytes_peak"]) == policy.about["bytes_peak"]
    code, out, _ = call(
        ["bench", best, "--model", str(tiny_folder), "--text", str(prose), "--context", "200",
         "--pairs", "2", "--steps", "4", "--json"],
        capsys,
    )  # fmt: skip
    timed = json.loads(out)
    assert code == 0 and timed["pairs"] == 2 and timed["bytes_resident"] < timed["full_bytes"]
    code, out, _ = call(["export", best, "--to", "transformers", "--out", str(tmp_path)], capsys)
    assert code == 0
    assert Policy.from_json(tmp_path / "policy.json").fingerprint() == policy.fingerprint()
    monkeypatch.setattr(sys, "argv", ["generate.py", str(tiny_folder), "once upon a time"])
    runpy.run_path(str(tmp_path / "generate.py"), run_name="__main__")
    assert "bytes after" in capsys.readouterr().err
    assert call(["validate", best], capsys)[0] == 0
    assert json.loads(call(["methods", "--json"], capsys)[1])["lacache"]["kind"] == "single"
    assert "slots" in json.loads(call(["schema"], capsys)[1])["properties"]


@pytest.mark.parametrize("command", ["run", "eval", "bench"])
def test_kernels_are_compiled_before_anything_is_measured(
    command: str, tiny_folder: Path, prose: Path, tmp_path: Path, capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def compiles(loaded: Any, say: Any) -> None:
        raise KvsearchError(f"the kernels of {loaded.device} come first")

    monkeypatch.setattr("kvsearch.session.load.kernels", compiles)
    argv = run_argv(tiny_folder, prose, tmp_path / "run")
    if command != "run":
        argv = [command, "full", "--model", str(tiny_folder), "--text", str(prose),
                "--context", "200"]  # fmt: skip
    code, _, err = call(argv, capsys)
    assert code == 2
    assert "the kernels of cpu come first" in err
    assert "evaluate: " not in err
    assert "decode speed: " not in err


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["run", "--model", "smollm2-135mm"], "did you mean"),
        (["run", "--space", "defualt"], "did you mean 'default'"),
        (["run", "--budget", "0"], "--budget must be above 0"),
        (["run", "--budget", "inf"], "at most 2^60, got inf"),
        (["eval", "h2o", "--budget", "inf"], "at most 2^60, got inf"),
        (["bench", "h2o", "--budget", "1e308"], "at most 2^60, got 1e+308"),
        (["adapt", "h2o", "--out", "o", "--budget-bytes", "9" * 400], "at most 2^60, got 999"),
        (["run", "--budget", "4000"], "raise --context or lower --budget"),
        (["run", "--dataset", "wikitext3"], "did you mean"),
        (["run", "--dataset", ""], "unknown dataset ''"),
        (["eval", "laccache", "--budget", "64"], "did you mean 'lacache'"),
        (["eval", "h2o"], "give --budget"),
        (["eval", "nothing.json"], "cannot read policy file"),
        (["export", "x.json", "--to", "vllm"], "cannot read policy file"),
        (["report", "nowhere"], "there is no run folder"),
        (["rum"], "did you mean 'run'"),
        (["run", "--budgte", "3"], "No such option"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(
    argv: list[str], part: str, tiny_folder: Path, capsys: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    if "--dataset" in argv:
        argv = [*argv, "--model", str(tiny_folder), "--context", "300", "--budget", "64"]
    code, out, err = call(argv, capsys)
    assert code == 2 and part in err and out == "" and "Traceback" not in err
    assert len([line for line in err.splitlines() if line.startswith("kvsearch:")]) == 1
    assert list(tmp_path.iterdir()) == []


def test_too_short_too_small_and_unwritable(
    tiny_folder: Path, prose: Path, tmp_path: Path, capsys: Any
) -> None:
    short = tmp_path / "short.txt"
    short.write_text("only a few words, " * 30)
    base = ["run", "--model", str(tiny_folder), "--context", "256", "--budget", "96"]
    code, _, err = call([*base, "--text", str(short), "--out", str(tmp_path / "a")], capsys)
    assert code == 2 and "longer text" in err
    blocked = tmp_path / "file"
    blocked.write_text("")
    argv = [*base, "--text", str(prose), "--out", str(blocked / "run")]
    code, _, err = call(argv, capsys)
    assert code == 2 and "another --out" in err
    code, _, err = call(
        [*base[:-1], "2", "--text", str(prose), "--out", str(tmp_path / "b"), "--score-from", "9",
         "--trials", "1", "--no-bench"],
        capsys,
    )  # fmt: skip
    assert code == 0 and (tmp_path / "b" / "best.json").exists(), err


@pytest.mark.parametrize(
    ("extra", "stop"),
    [
        ([], signal.SIGINT),
        pytest.param(["--workers", "2"], signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(["--ray", "local", "--workers", "2"], signal.SIGINT, marks=pytest.mark.slow),
    ],
    ids=["here", "processes", "ray"],
)
def test_ctrl_c_and_sigterm_keep_what_was_measured(
    extra: list[str], stop: signal.Signals, tiny_folder: Path, prose: Path, tmp_path: Path
) -> None:
    if "--ray" in extra:
        pytest.importorskip("ray")
    out = tmp_path / "stopped"
    argv = run_argv(tiny_folder, prose, out)
    argv[argv.index("3")] = "400"
    child = subprocess.Popen(
        [sys.executable, "-m", "kvsearch", *argv, *FEW, *extra, "--quiet"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ},
        start_new_session=True,
    )  # fmt: skip
    file = out / "trials.jsonl"
    deadline = time.monotonic() + 240  # a busy machine starts Ray slowly
    while time.monotonic() < deadline and (not file.exists() or file.read_text().count("\n") < 8):
        time.sleep(0.05)
    os.killpg(child.pid, stop)  # as a terminal or `timeout` does: the whole group gets it
    printed, err = child.communicate(timeout=180)
    assert child.returncode == 130, err
    assert "Traceback" not in err and "The run has not ended" in printed
    assert file.read_text().count("\n") >= 8
    folder = RunFolder(out, write=False)
    counts = {t.name: folder.attempts.of("search", t.fingerprint) for t in folder.running()}
    assert not any(counts.values()), counts
    with pytest.raises(ProcessLookupError):  # no process is left
        for _ in range(400):
            os.killpg(child.pid, 0)
            time.sleep(0.05)


@pytest.mark.parametrize(
    ("threads", "tokens", "free", "processes"),
    [
        (2, 1 << 40, 1 << 40, 2),
        (16, 1 << 40, 1 << 40, 4),
        (1, 1 << 40, 1 << 40, 0),  # one core: nothing to gain
        (2, 1000, 1 << 40, 0),  # a short run is over before processes have started
        (16, 1 << 40, 7, 3),  # memory for the weights of three, twice over
        (16, 1 << 40, 2, 0),
    ],
)
def test_evaluators_of_a_long_run_on_a_cpu_are_processes(
    threads: int, tokens: int, free: int, processes: int, tiny_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    loaded = load_model(str(tiny_folder))
    held = sum(p.nbytes for p in loaded.model.parameters())
    monkeypatch.setattr(evaluators, "free_memory", lambda _: free * held)
    monkeypatch.setattr(evaluators.torch, "get_num_threads", lambda: threads)
    assert evaluators.processes(loaded, tokens) == processes
    assert evaluators.processes(replace(loaded, device="cuda:0"), tokens) == 0
