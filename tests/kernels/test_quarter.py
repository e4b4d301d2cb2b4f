"""The command for a quarter of an hour on a GPU, end to end on a stand-in."""

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.slow

BENCH = Path(__file__).parents[2] / "kernels/bench"
STAGES = {"a", "b", "c", "d", "e", "f", "g"}
NCU = """#!/bin/sh
echo $$ > {pid}
exec sleep 600
"""


@pytest.fixture(scope="module")
def bench():
    """The command's modules, whose folder is no package."""
    before = dict(os.environ)
    sys.path.insert(0, str(BENCH))
    names = ("quarter", "pool", "derive", "timing", "counters", "jobs")
    yield SimpleNamespace(**{name: import_module(name) for name in names})
    sys.path.remove(str(BENCH))
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def tried(tmp_path_factory):
    """Records of a call that was killed, and of one that went on; pytest fails, and ncu hangs."""
    folder = tmp_path_factory.mktemp("quarter")
    ncu = folder / "bin/ncu"
    ncu.parent.mkdir()
    ncu.write_text(NCU.format(pid=folder / "ncu.pid"))
    ncu.chmod(0o755)
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"PATH": f"{ncu.parent}{os.pathsep}{env['PATH']}", "TMPDIR": str(folder),
            "PYTEST_ADDOPTS": "--there-is-no-such-option"}  # fmt: skip
    out = folder / "out"
    command = [sys.executable, str(BENCH / "quarter.py"), "--stand-in", "--out", str(out)]
    command += ["--minutes", "20", "--commit", "abc"]  # on a machine that others use as well

    def ended():
        return [x for x in rows(out) if "ended" in x]

    first = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)
    while len(ended()) < 6 and first.poll() is None:
        time.sleep(0.05)
    first.kill()
    first.wait()
    with (out / "records.jsonl").open("a") as file:
        file.write('{"session": 1, "stage": "a", "un')  # as a kill may leave it
    second = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert second.returncode == 0, second.stderr[-2000:]
    return SimpleNamespace(folder=folder, out=out, said=second.stdout)


def rows(out):
    path = out / "records.jsonl"
    return [json.loads(x) for x in path.read_bytes().split(b"\n")[:-1]] if path.exists() else []


def test_a_later_call_goes_on_where_the_last_was_killed(tried):
    ends = [x for x in rows(tried.out) if "ended" in x]
    assert {x["stage"] for x in ends if x["session"] == 2} == STAGES
    assert len({x["key"] for x in ends}) == len(ends)  # none ran twice
    assert sum(x["session"] == 1 for x in ends) >= 6
    assert [x["stage"] for x in ends] == sorted(x["stage"] for x in ends)


def _runs(pid: int) -> bool:
    """Whether a process is there, and no zombie that nobody has waited for yet."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def test_a_unit_that_fails_or_hangs_costs_only_itself(tried):
    ends = {x["unit"]: x for x in rows(tried.out) if "ended" in x}
    wrong = {unit: x["ended"] for unit, x in ends.items() if x["ended"] != "done"}
    assert wrong == {"tests/gpu": "failed", "ncu": "stopped"}
    assert "pytest ended with code 4" in ends["tests/gpu"]["reason"]
    assert ends["ncu"]["reason"] == "it was stopped after 5 s"
    assert not _runs(int((tried.folder / "ncu.pid").read_text()))
    for said in ("tests/gpu | failed", "ncu | stopped", "it was stopped after 5 s"):
        assert said in tried.said
    assert "no-such-option" in (tried.out / "log.txt").read_text()


def test_every_stage_says_what_it_is_for(tried, bench):
    known = bench.derive.latest(rows(tried.out))
    tables = {name: table(known) for name, table in bench.derive.TABLES.items()}
    empty = {"aims.csv", "tests.csv", "counters.csv"}  # of a 7B model, of pytest and of ncu
    assert {name for name, found in tables.items() if not found} == empty
    for name, found in tables.items():
        assert all(row["gpu"] and row["commit"] == "abc" for row in found), name
    assert {x["result"] for x in tables["probes.csv"]} == {"right"}
    caches = {(x["cache"], x["way"]) for x in tables["decode.csv"] if x["batch"] == 1}
    assert caches >= {("full", "eager"), ("compiled", "compiled"), ("scored+rotated4", "graphs")}
    searched = {x["unit"] for x in tables["search.csv"]}
    assert searched == {"kvsearch run", "search tiny"}
    off = [float(x["off"]) for x in tables["patterns.csv"] if x["impl"] == "flex"]
    assert len(off) == 3
    assert max(off) < 1e-5
    assert len(list(tried.out.iterdir())) <= 8  # more do not come back from a machine that is lent


def test_times_of_a_stand_in_are_no_figures(tried, tmp_path):
    derive = shutil.copy(BENCH / "derive.py", tmp_path)
    (tmp_path / "records").mkdir()
    lines = (tried.out / "records.jsonl").read_text()
    command = [sys.executable, derive, "--out", str(tmp_path)]
    (tmp_path / "records/one.jsonl").write_text(lines)
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "they are no figures" in refused.stderr
    assert not list(tmp_path.glob("*.csv"))
    (tmp_path / "records/one.jsonl").write_text(lines.replace('"stand_in": true', '"stand_in": 0'))
    subprocess.run(command, check=True)
    with (tmp_path / "decode.csv").open() as file:
        (full, *_) = list(csv.DictReader(file))
    assert (full["cache"], full["times_full"]) == ("full", "1")


def machine(number, **about):
    known = dict.fromkeys(("driver", "torch", "triton", "transformers", "commit"), "1")
    return {"session": number, "about": known | {"gpu": "H"} | about}


def line(session, unit, key, **row):
    return {"session": session, "stage": "c", "unit": unit, "key": key, "row": row}


def decoded(cache, way, ms):
    return {"model": "llama2-7b", "context": 4096, "batch": 1, "cache": cache, "way": way,
            "ms": [ms, ms, ms], "host_ms": ms, "peak_bytes": 0, "clocks": {}}  # fmt: skip


def test_tables_have_the_last_answer_of_each_card_and_compare_within_it(bench):
    said = [
        machine(1), machine(2), machine(3, gpu="other"),
        line(1, "full", "k1", **decoded("full", "eager", 9.0)),
        line(2, "full", "k2", **decoded("full", "eager", 8.0)),  # of other sources
        line(2, "full", "k2", **decoded("full", "eager", 8.0) | {"kernels_ms": 2.0}),
        line(2, "scored", "k3", **decoded("scored+rotated4", "graphs", 2.0)),
        line(3, "full", "k4", **decoded("full", "eager", 50.0)),
    ]  # fmt: skip
    known = bench.derive.latest(said)
    found = bench.derive.decoded(known)
    assert [(x["gpu"], x["cache"], x["ms"], x["times_full"]) for x in found] == [
        ("H", "full", "8", "1"), ("H", "scored+rotated4", "2", "4"), ("other", "full", "50", "1")
    ]  # fmt: skip
    assert found[0]["kernels_ms"] == 2.0
    (aim,) = bench.derive.aims(known)
    assert (aim["bound"], aim["value"], aim["met"]) == (">= 3.0", "4", "yes")


@pytest.fixture
def pool(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(bench.pool, "PRELOADED", ())
    monkeypatch.setenv("PYTHONPATH", "")
    return bench.pool.Pool(tmp_path / "log.txt")


def served(pool, units, **how):
    """How units ended, and their rows, in order."""
    ends, told = {}, []

    def heard(unit, said):
        if isinstance(said, dict):
            told.append((unit.name, said))
        else:
            ends[unit.name] = said.how, said.reason

    pool.run(units, heard, **how)
    return ends, told


def test_a_process_that_hangs_or_dies_is_replaced_and_its_rows_are_kept(bench, pool, tmp_path):
    script = tmp_path / "says.py"
    script.write_text(
        "import os, signal, subprocess\nfrom pool import Skipped, emit\n"
        "emit(at=what, pid=os.getpid())\n"
        "if what == 'hangs': subprocess.run(['sleep', '600'])\n"
        "if what == 'dies': os.kill(os.getpid(), signal.SIGSEGV)\n"
        "if what == 'fails': raise ValueError('no kernel')\n"
        "if what == 'skips': raise Skipped('no room')\n"
        "if what == 'breaks': raise RuntimeError('CUDA error: gone')\n"
    )
    units = []
    for what in ("works", "fails", "skips", "dies", "after", "hangs", "breaks", "last"):
        asked = {"path_name": str(script), "init_globals": {"what": what}}
        units.append(bench.pool.Unit(what, "runpy:run_path", asked, 3.0 if what == "hangs" else 60))
    ends, told = served(pool, units)
    assert ends == {
        "works": ("done", None),
        "fails": ("failed", "ValueError: no kernel"),
        "skips": ("skipped", "no room"),
        "dies": ("failed", "its process ended with signal 11"),
        "after": ("done", None),
        "hangs": ("stopped", "it was stopped after 3 s"),
        "breaks": ("failed", "RuntimeError: CUDA error: gone"),
        "last": ("done", None),
    }
    pids = {row["at"]: row["pid"] for _, row in told}
    assert len(pids) == 8
    same = [pids[x] == pids["works"] for x in ("fails", "skips", "dies", "after")]
    assert same == [True, True, True, False]
    assert len({pids["after"], pids["hangs"], pids["breaks"], pids["last"]}) == 3


def test_what_there_is_no_time_for_is_cut_or_not_begun(bench, pool):
    asked = {"args": ["sleep", "600"]}
    units = [bench.pool.Unit(str(i), "subprocess:run", asked, 100.0) for i in range(3)]
    ends, _ = served(pool, units, width=2, end=time.monotonic() + 4)
    assert ends == dict.fromkeys("01", ("cut", "time was up"))


def test_what_cannot_run_is_said_in_one_sentence(bench, tmp_path, monkeypatch, capsys):
    out = str(tmp_path / "out")
    assert bench.quarter.main(["--out", out, "--model", "gone.gguf"]) == 2
    assert capsys.readouterr().err == (
        "there is no file gone.gguf; give --model another one, or leave it out\n"
    )
    assert not Path(out).exists()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="there is no GPU here"):
        bench.timing.about()
    old = SimpleNamespace(name="T4", major=7, minor=5)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: old)
    with pytest.raises(RuntimeError, match=r"T4 has compute capability 7.5, and kernels need 8.0"):
        bench.timing.about()
    monkeypatch.setattr(bench.quarter.Quarter, "look", lambda self: "there is no GPU here")
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    try:
        assert bench.quarter.main(["--out", out]) == 2
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGINT, before[1])
    assert capsys.readouterr().err == "there is no GPU here\n"
    with pytest.raises(SystemExit):
        bench.quarter.main(["--out", out, "--only", "a,z"])
    assert "there is no stage 'z'" in capsys.readouterr().err


def test_what_changed_runs_anew(bench, tmp_path, monkeypatch):
    quarter = bench.quarter.Quarter(tmp_path, stand_in=True, again=False, limit=9.0)
    quarter.about = {"gpu": "H", "torch": "2", "triton": "3", "transformers": "5"}
    source = tmp_path / "kernel.py"
    source.write_text("1")
    monkeypatch.setattr(bench.quarter, "ROOT", tmp_path)
    units = [bench.pool.Unit("one", "a:b"), bench.pool.Unit("two", "a:b")]
    stage = bench.quarter.Stage("a", "some", 1, units, ["*.py"])
    for (unit, key), how in zip(quarter.due(stage), ("done", "stopped"), strict=True):
        quarter.records.add(stage="a", unit=unit.name, key=key, ended=how)
    assert quarter.due(stage) == []
    quarter.again = True
    assert [unit.name for unit, _ in quarter.due(stage)] == ["two"]
    quarter.again = False
    quarter.about["gpu"] = "another"
    assert len(quarter.due(stage)) == 2
    quarter.about["gpu"] = "H"
    source.write_text("2")
    assert len(quarter.due(stage)) == 2


def test_tests_of_decoding_come_first(bench):
    """By names that are there."""
    files = [
        (BENCH.parents[1] / f"tests/gpu/test_gpu_{x}.py").read_text() for x in ("layers", "models")
    ]
    there = re.findall(r"^def (test_\w+)", "\n".join(files), re.MULTILINE)
    assert {*bench.jobs.FIRST} < {*there}
    items = [SimpleNamespace(originalname=name) for name in there]
    bench.jobs.pytest_collection_modifyitems(items)
    assert [item.originalname for item in items[: len(bench.jobs.FIRST)]] == [*bench.jobs.FIRST]


def test_counters_are_read_from_what_ncu_prints(bench):
    head = '"ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"\n'
    text = (
        "==PROF== noise\nlaunched one b8\n" + head
        + '"0","_attend","GPU Speed Of Light","Duration","us","12.5"\n'
        + '"0","_attend","Occupancy","Registers","register/thread","64"\n'
        + '"0","_attend","Occupancy","","",""\n'
        + '"1","_join","GPU Speed Of Light","Duration","us","2"\n'
    )  # fmt: skip
    found = list(bench.counters.kernels(text))
    assert [x["kernel"] for x in found] == ["_attend", "_join"]
    assert found[0]["metrics"] == {"Duration, us": "12.5", "Registers, register/thread": "64"}
    assert found[0]["launches"] == ["one b8"]
