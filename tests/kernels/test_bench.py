import os
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch

from kvsearch_kernels.decode_step import triton_impl as decode_step

BENCH = Path(__file__).parents[2] / "kernels/bench"


@pytest.fixture(scope="module")
def bench():
    """The benchmark's modules, whose folder is no package."""
    before = os.environ.get("KVSEARCH_TRITON")
    sys.path.insert(0, str(BENCH))
    try:
        yield {name: import_module(name) for name in ("worker", "cases", "decoding", "pool")}
    finally:
        sys.path.remove(str(BENCH))
        os.environ.pop("KVSEARCH_TRITON", None)
        if before is not None:
            os.environ["KVSEARCH_TRITON"] = before


@pytest.mark.slow
def test_every_kernel_that_is_timed_has_a_reference_that_passes(bench):
    worker = bench["worker"]
    every = [case for op in bench["cases"].OPS for case in worker.distinct(op)]
    assert {case.op for case in every} == {*bench["cases"].OPS} and len(every) > 95
    for case in every:
        assert worker.examine(case, "cpu", torch.float16, "reference") is None, case.label


@pytest.mark.slow
def test_tuning_tries_every_setting_on_the_cpu(bench, tmp_path):
    tune = import_module("tune")
    assert tune.main(["--dry-run", "--out", str(tmp_path / "rows.csv")]) == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_host_time_is_that_of_the_op_which_a_token_asks():
    pytest.importorskip("triton", reason="triton is not installed")
    run = subprocess.run(
        [sys.executable, str(BENCH / "host.py")], capture_output=True, text=True, check=True
    )
    assert [line.split()[1] for line in run.stdout.splitlines()] == ["decode_step"] * 4


@pytest.mark.parametrize("op", ["decode_step", "scored_attention", "dequantize_kv"])
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


def test_a_setting_that_is_timed_is_not_the_one_before(bench):
    tune, cases = import_module("tune"), bench["cases"]
    case = cases.Case("decode_step", cases.MODELS[0], 8, 1024, "4")
    work = cases.build(case, "cpu", 0, tiny=False, dtype=torch.float16)
    q, k, _, stores = work.args
    found = {}
    for at in (tune.PRESENT, tune.Setting(16, 32, 1, 3), tune.Setting(8, 64, 2, 3)):
        tune.use(at)
        tune.anew(work)
        plan = decode_step.planned(stores, q, k)
        assert (plan.tile.columns, plan.tile.warps) == (at.columns, at.warps)
        found[at] = len(plan.table.programs)
    tune.use(tune.PRESENT)
    assert len({*found.values()}) == 3


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


def test_a_cell_that_does_not_fit_is_skipped_with_a_sentence(bench, monkeypatch):
    decoding = bench["decoding"]
    # 13.5 GB of weights, and 137 GB of keys and values
    assert 150e9 < decoding.bytes_needed("llama2-7b", 32768, 8, "full") < 155e9
    assert decoding.bytes_needed("mistral-7b", 32768, 8, "compiled") < 60e9
    assert decoding.bytes_needed("llama2-7b", 4096, 1, "scored+rotated4") < 20e9
    monkeypatch.setattr(decoding, "free", lambda: 80_000_000_000)
    with pytest.raises(bench["pool"].Skipped, match=r"about 15\d GB, and 80 GB are free"):
        decoding.decode("llama2-7b", 32768, 8, "full")
