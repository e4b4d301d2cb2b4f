import csv
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).parents[2] / "kernels/bench"


@pytest.fixture(scope="module")
def bench():
    """The benchmark's modules, whose folder is no package."""
    before = os.environ.get("KVSEARCH_TRITON")
    sys.path.insert(0, str(BENCH))
    try:
        yield {name: import_module(name) for name in ("run", "worker", "cases")}
    finally:
        sys.path.remove(str(BENCH))
        os.environ.pop("KVSEARCH_TRITON", None)
        if before is not None:
            os.environ["KVSEARCH_TRITON"] = before


@pytest.mark.slow
@pytest.mark.parametrize("script", ["run.py", "end_to_end.py", "tune.py"])
def test_the_dry_run_runs_every_case_and_writes_nothing(script, tmp_path):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, str(BENCH / script), "--dry-run", "--out", str(tmp_path / "rows.csv")],
        env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "nothing was timed" in run.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_host_time_is_that_of_the_op_which_a_token_asks():
    pytest.importorskip("triton", reason="triton is not installed")
    run = subprocess.run(
        [sys.executable, str(BENCH / "host.py")], capture_output=True, text=True, check=True
    )
    assert [line.split()[1] for line in run.stdout.splitlines()] == ["decode_step"] * 4


def test_a_process_that_hangs_or_dies_has_still_said_what_it_found(bench):
    say = "import sys, time; print('row {\"a\": 1}', flush=True); print('noise'); "
    start = time.monotonic()
    rows, reason = bench["run"].child([sys.executable, "-c", say + "time.sleep(60)"], 2.0)
    assert (rows, reason) == ([{"a": 1}], "it was stopped after 2 s")
    assert time.monotonic() - start < 20
    rows, reason = bench["run"].child([sys.executable, "-c", say + "sys.exit('no kernel')"], 30.0)
    assert (rows, reason) == ([{"a": 1}], "no kernel")
    assert bench["run"].child([sys.executable, "-c", say], 30.0) == ([{"a": 1}], None)


def test_what_fails_costs_only_itself_and_is_a_row(bench, tmp_path, monkeypatch, capsys):
    run, calls = bench["run"], []

    def stage(name, limit, **o):
        calls.append((name, o.get("impls"), o.get("dtype")))
        if name == "gate":
            return [{"reason": "off by 3" if o["dtype"] == "bfloat16" else None}], None
        if name == "check":
            ok = [{"model": c.model.name, "variant": c.variant, "reason": None}
                  for c in run.distinct(o["op"])]  # fmt: skip
            return [{**ok[0], "reason": "flat attention: wrong"}, *ok[1:-1]], "it hung"
        shape = {"model": "m", "batch": 1, "context": 8, "variant": "16"}
        assert o["impls"] != ["triton"] or len(o["kernels"]) == len(run.distinct(o["op"])) - 2
        rows = [{**shape, "impl": o["impls"][0], "nbytes": 8, "ms": [1, 2, 3]},
                {**shape, "impl": o["impls"][0], "reason": "no memory"}]  # fmt: skip
        return rows, None if o["impls"] == ["triton"] else "it was stopped after 5 s"

    monkeypatch.setattr(run, "stage", stage)
    table = run.Table(tmp_path / "rows.csv", {"gpu": "some"})
    found = run.examine_all(["decode_attention"], table, 100.0, 1)["decode_attention"]
    run.run_op("decode_attention", found, table, 1e12, 100.0)
    run.show(table.rows)
    shown = capsys.readouterr().out
    assert "2.00x" not in shown
    assert "1.00x the best baseline's speed" in shown
    with (tmp_path / "rows.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {r["gpu"] for r in rows} == {"some"}
    assert [c[0] for c in calls] == ["gate", "gate", "check", *["clock"] * 2]
    assert calls[3] == ("clock", ["triton"], "float16")  # the type that passed its gate
    notes = [(r["metric"], r["impl"], r["note"]) for r in rows if r["note"]]
    assert ("gate", "triton", "off by 3") in notes
    assert ("check", "triton", "flat attention: wrong") in notes
    assert ("check", "triton", "not compared with the reference: it hung") in notes
    assert ("time", "baselines", "it was stopped after 5 s") in notes
    assert ("time", "sdpa", "no memory") in notes
    assert sum(r["metric"] == "of read roof" for r in rows) == 2


def test_an_op_that_does_not_exist_is_named(bench, capsys):
    with pytest.raises(SystemExit):
        bench["run"].main(["--dry-run", "--only", "decode"])
    assert "no op called 'decode'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "op", ["decode_step", "decode_attention", "scored_attention", "dequantize_kv"]
)
def test_every_case_is_compared_with_the_reference(bench, op):
    case = bench["worker"].distinct(op)[0]
    work = bench["cases"].build(case, "cpu", 0, tiny=True, dtype=torch.float16, peaked=True)
    assert bench["worker"].wrong(work, "reference") is None

    def broken():
        found = work.op.reference(*work.args, **work.kwargs)
        return found * 1.01 if isinstance(found, torch.Tensor) else (found[0] * 1.01, found[1])

    assert bench["worker"].wrong(replace(work, baselines={"broken": broken}), "broken") is not None


def test_tuning_begins_with_what_compiles_nothing(bench):
    tune = import_module("tune")
    every = list(tune.settings())
    assert every[0] == tune.PRESENT
    tiles = [at.tile == tune.PRESENT.tile for at in every]
    assert tiles == sorted(tiles, reverse=True)
    assert len({at.at_once for at in every if at.tile == tune.PRESENT.tile}) == 5


def test_only_what_is_asked_for_is_timed(bench, tmp_path, monkeypatch):
    run, timed = bench["run"], []
    monkeypatch.setattr(
        run, "stage", lambda name, limit, **o: (timed.append(o["impls"]), ([], None))[1]
    )
    found = run.Sound("float16", [])
    for impls in (["triton"], ["triton", "sdpa"]):
        run.run_op("decode_attention", found, run.Table(tmp_path / "t.csv", {}), 1.0, 100.0, impls)
    assert timed == [["triton"], ["triton"], ["sdpa"]]
    with pytest.raises(SystemExit):
        run.main(["--dry-run", "--impls", "triton,cudnn"])


def test_evictions_start_from_the_same_slots_each_time(bench):
    cases = bench["cases"]
    heads = replace(cases.MODELS[2], dim=64)
    case = cases.Case("evict_in_place", heads, 1, 160, "64 intervals")
    work = cases.build(case, "cpu", 0, tiny=False, dtype=torch.float32)
    sums, born = (x.clone() for x in work.args[1:3])
    work.run("reference")()
    assert (work.args[2] > born.max()).any()  # tokens of later intervals have taken places
    work.first()
    assert torch.equal(work.args[1], sums)
    assert torch.equal(work.args[2], born)


def test_a_copy_is_not_there_before(bench):
    case = bench["worker"].distinct("copy_rows")[0]
    work = bench["cases"].build(case, "cpu", 0, tiny=True, dtype=torch.float16, peaked=False)
    for copy in work.args[0]:
        assert not torch.equal(copy.to, copy.of)


def test_a_setting_that_does_not_fit_is_skipped_with_a_sentence(bench):
    speed = import_module("end_to_end")
    at = speed.Setting("full", 8, 32768)
    assert speed.why_not(at, speed.LLAMA_7B, 1 << 60) is None
    # 13.5 GB of weights and 137 GB of keys and values, at least
    assert "needs about 1" in speed.why_not(at, speed.LLAMA_7B, 150_000_000_000)
    small = speed.Setting("scored+rotated4", 1, 4096)
    assert speed.why_not(small, speed.LLAMA_7B, 24_000_000_000) is None


def test_after_a_cache_that_fails_a_new_process_goes_on(bench, monkeypatch):
    speed, asked = import_module("end_to_end"), []

    def child(command, limit):
        caches = json.loads(command[-1])["caches"]
        asked.append(caches)
        if caches[0] == "full":  # the second ends the process
            return [{"cache": "full", "ms": [1.0]}], "it was stopped after 9 s"
        return [{"cache": caches[0], "reason": "RuntimeError: CUDA error: gone"}], None

    monkeypatch.setattr(speed, "child", child)
    rows = list(speed.rows_of(4096, 1, ["full", "a", "b"], 9.0))
    assert asked == [["full", "a", "b"], ["b"]]
    assert [r["cache"] for r in rows] == ["full", "a", "b"]
    assert [r.get("reason") for r in rows] == [
        None, "it was stopped after 9 s", "RuntimeError: CUDA error: gone"
    ]  # fmt: skip
