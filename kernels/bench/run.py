"""Time the kernels against 16-bit baselines of the same run.

    python kernels/bench/run.py --seconds 480                        # on a GPU
    python kernels/bench/run.py --only decode_attention,gather_kv --out rows.csv
    python kernels/bench/run.py --dry-run       # anywhere: tiny shapes, no timing, no file

First, all ops side by side: the correctness gate (the op's probe in fp16 and in bf16, and a case
with flat and with peaked attention), then all kernels of the op compiled in parallel and each
compared with the reference. Then, op by op, each implementation is timed by CUDA-graph replay over
rotating inputs. Every stage is a process of its own with a time limit: one that fails or hangs
stops no other, and is a row with the reason.
"""

import argparse
import csv
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, TextIO

import torch

HERE = Path(__file__).parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

from cases import BASELINES, OPS, implementations  # noqa: E402
from worker import MARK, distinct, examine, results_are_finite  # noqa: E402

COLUMNS = (
    "op", "impl", "model", "batch", "context", "variant", "dtype", "metric", "unit",
    "p20", "p50", "p80", "note", "gpu", "driver", "torch", "triton", "commit",
)  # fmt: skip
DTYPES = ("bfloat16", "float16")  # the first that passes is timed: it is what models run in
# of the time that is left for what follows
SHARES = {
    "decode_step": 6,
    "decode_attention": 4,
    "scored_decode": 3,
    "lifetime_attention": 4,
    "scored_attention": 2,
}
SLACK = 45.0  # seconds beyond the limit of a stage, to import and to finish


def child(
    command: Sequence[str], limit: float, threads: int | None = None
) -> tuple[list[dict[str, Any]], str | None]:
    """Rows of a process, and the reason if it failed, or None.

    Args:
        command: writes rows as `worker.emit` does.
        limit: seconds after which it is killed, with the processes that it started.
        threads: of its CPU, where others run beside it.
    """
    env = os.environ if threads is None else os.environ | {"OMP_NUM_THREADS": str(threads)}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            command, stdout=out, stderr=err, text=True, process_group=0, env=env
        )
        reason = None
        try:
            if process.wait(max(1.0, limit)):
                reason = _last_line(err) or f"it ended with code {process.returncode}"
        except subprocess.TimeoutExpired:
            reason = f"it was stopped after {limit:.0f} s"
        with suppress(ProcessLookupError):  # and what it started, some of which may outlive it
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        out.seek(0)
        rows = [
            json.loads(x.removeprefix(MARK)) for x in out if x.startswith(MARK) and x[-1] == "\n"
        ]
    return rows, reason


def _last_line(file: TextIO) -> str:
    file.seek(0)
    lines = [x.strip() for x in file if x.strip()]
    return lines[-1] if lines else ""


def stage(name: str, limit: float, **options: Any) -> tuple[list[dict[str, Any]], str | None]:
    """A stage of `worker.py` in a process of its own."""
    command = [sys.executable, str(HERE / "worker.py"), name, json.dumps(options)]
    return child(command, limit, None if name == "clock" else 1)


class Table:
    """Rows of the result, in a file as soon as they are known."""

    def __init__(self, path: Path, always: Mapping[str, str]) -> None:
        self.rows: list[dict[str, str]] = []
        self._path, self._always, self._lock = path, always, Lock()

    def add(self, **row: Any) -> None:
        """Add a row; one with a note is also printed to stderr."""
        full = {c: "" for c in COLUMNS} | self._always | {k: str(v) for k, v in row.items()}
        if full["note"]:
            what = (full[c] for c in ("op", "impl", "dtype", "model", "variant", "context"))
            print(f"{' '.join(x for x in what if x)}: {full['note']}", file=sys.stderr)
        with self._lock:
            new = not self._path.exists()
            with self._path.open("a", newline="") as file:
                writer = csv.DictWriter(file, COLUMNS)
                if new:
                    writer.writeheader()
                writer.writerow(full)
            self.rows.append(full)


@dataclass(frozen=True)
class Sound:
    """What of an op may be timed: kernels that agree with the reference, in a type that passed.

    Attributes:
        dtype: of queries, keys and values.
        kernels: pairs of model and variant.
    """

    dtype: str
    kernels: list[list[str]]


def passed_gate(op: str, table: Table, limit: float) -> list[str]:
    """The types in which Triton passes the gate of `op`."""
    passed = []
    with ThreadPoolExecutor(len(DTYPES)) as pool:
        done = list(pool.map(lambda dtype: stage("gate", limit, op=op, dtype=dtype), DTYPES))
    for dtype, (rows, reason) in zip(DTYPES, done, strict=True):
        reason = reason or (rows[-1]["reason"] if rows else "it said nothing")
        table.add(op=op, impl="triton", dtype=dtype, metric="gate", note=reason or "",
                  p50="failed" if reason else "passed")  # fmt: skip
        if reason is None:
            passed.append(dtype)
    return passed


def sound(op: str, dtype: str, table: Table, limit: float, workers: int) -> list[list[str]]:
    """Models and variants of `op` whose kernel agrees with the reference."""
    rows, died = stage("check", limit, op=op, dtype=dtype, workers=workers)
    verdicts = {(r["model"], r["variant"]): r["reason"] for r in rows}
    good = []
    for case in distinct(op):
        key = case.model.name, case.variant
        reason = verdicts.get(key, f"not compared with the reference: {died or 'no verdict'}")
        if reason is None:
            good.append(list(key))
        else:
            table.add(op=op, impl="triton", model=key[0], variant=key[1], dtype=dtype,
                      metric="check", p50="failed", note=reason)  # fmt: skip
    return good


def examine_all(
    ops: Sequence[str], table: Table, limit: float, workers: int
) -> dict[str, Sound | None]:
    """Gate and check all ops side by side, in about `limit` seconds; None where no type passed."""
    count = sum(len(distinct(op)) for op in ops)

    def one(op: str) -> Sound | None:
        passed = passed_gate(op, table, limit / 2 + SLACK)
        if not passed:
            return None
        mine = max(1, round(workers * len(distinct(op)) / count))
        return Sound(passed[0], sound(op, passed[0], table, limit / 2 + SLACK, mine))

    with ThreadPoolExecutor(len(ops)) as pool:
        return dict(zip(ops, pool.map(one, ops), strict=True))


def run_op(
    op: str, found: Sound | None, table: Table, roof: float | None, seconds: float,
    impls: Sequence[str] = ("triton", *BASELINES),
) -> None:  # fmt: skip
    """Time those of `impls` that an op has, within about `seconds`."""
    end = time.monotonic() + seconds
    everything = [[c.model.name, c.variant] for c in distinct(op)]
    baselines = [x for x in implementations(op) if x != "triton" and x in impls]
    todo = [(["triton"], found)] if found and "triton" in impls else []
    todo += [(baselines, Sound(DTYPES[0], everything))] if baselines else []
    for i, (mine, what) in enumerate(todo):
        budget = max(5.0, (end - time.monotonic()) / (len(todo) - i))
        asked = {"op": op, "impls": mine, "dtype": what.dtype, "kernels": what.kernels}
        rows, reason = stage("clock", budget + SLACK, seconds=budget, **asked)
        for row in rows:
            _add_times(table, roof, op, row["impl"], what.dtype, row)
        if reason:
            name = "triton" if mine == ["triton"] else "baselines"
            table.add(op=op, impl=name, dtype=what.dtype, metric="time", note=reason)


def _add_times(
    table: Table, roof: float | None, op: str, impl: str, dtype: str, row: dict[str, Any]
) -> None:
    shared = {"op": op, "impl": impl, "dtype": dtype}
    shared |= {k: row[k] for k in ("model", "batch", "context", "variant")}
    if "reason" in row:
        table.add(**shared, metric="time", note=row["reason"])
        return
    share = [row["nbytes"] / ms * 1e3 / roof for ms in reversed(row["ms"])] if roof else None
    for metric, unit, values in (("time", "ms", row["ms"]), ("of read roof", "1", share)):
        if values is not None:
            numbers = {p: f"{v:.5g}" for p, v in zip(("p20", "p50", "p80"), values, strict=True)}
            table.add(**shared, metric=metric, unit=unit, **numbers)


def environment() -> dict[str, str]:
    """What every row records."""
    commit = ""
    with suppress(OSError):  # without git
        asked = ["git", "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(
            asked, capture_output=True, text=True, cwd=HERE, check=False
        ).stdout.strip()
    found = {"torch": torch.__version__, "commit": commit, "gpu": "", "driver": "", "triton": ""}
    if torch.cuda.is_available():
        import triton

        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        text = subprocess.run(query, capture_output=True, text=True, check=False).stdout
        name, _, driver = text.splitlines()[0].partition(", ") if text else ("", "", "")
        found |= {"gpu": name, "driver": driver, "triton": triton.__version__}
    return found


def show(table: Sequence[dict[str, str]]) -> None:
    """Print the medians, with the speed against the best 16-bit baseline of the same shape."""

    def shape(row: dict[str, str]) -> tuple[str, ...]:
        return tuple(row[c] for c in ("op", "model", "batch", "context"))

    timed = [row for row in table if row["p50"] and row["unit"]]
    best: dict[tuple[str, ...], float] = {}
    for row in timed:
        if row["impl"] != "triton" and row["metric"] == "time":
            best[shape(row)] = min(best.get(shape(row), float("inf")), float(row["p50"]))
    for row in table:
        name = " ".join((*shape(row), row["variant"]))
        line = f"{name:60} {row['impl']:10} {row['metric']:12} {row['p50']:>10} {row['unit']}"
        if row["metric"] == "time" and row in timed and shape(row) in best:
            line += f"  {best[shape(row)] / float(row['p50']):.2f}x the best baseline's speed"
        print(line.rstrip() + (f"  {row['note']}" if row["note"] else ""))


def dry_run(ops: Sequence[str]) -> int:
    """Build every distinct case at a tiny shape on the CPU, and examine the reference itself."""
    count = 0
    for op in ops:
        for i, case in enumerate(distinct(op)):
            count += 1
            if not results_are_finite(case, "cpu", torch.float32):
                raise RuntimeError(f"{case.label}: the result is not finite")
            for dtype in (torch.float16, torch.bfloat16) if i == 0 else ():
                if reason := examine(case, "cpu", dtype, "reference"):
                    raise RuntimeError(f"{case.label}: {reason}")
    print(f"dry run: {count} cases ran on the CPU at tiny shapes; nothing was timed")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=480.0, help="about how long all may take")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU, no timing")
    parser.add_argument("--gate-only", action="store_true", help="check kernels, time nothing")
    parser.add_argument("--only", default=",".join(OPS), help="ops, separated by commas")
    known = ("triton", *BASELINES)
    parser.add_argument("--impls", default=",".join(known), help="what is timed, likewise")
    parser.add_argument("--workers", type=int, default=12, help="processes that compile")
    parser.add_argument("--out", type=Path, default=HERE / "results.csv", help="rows are appended")
    args = parser.parse_args(argv)
    ops = [op for op in OPS if op in args.only.split(",")]
    if unknown := {*args.only.split(",")} - {*OPS}:
        parser.error(f"there is no op called {min(unknown)!r}; there are {', '.join(OPS)}")
    impls = args.impls.split(",")
    if unknown := {*impls} - {*known}:
        parser.error(f"nothing is called {min(unknown)!r}; there are {', '.join(known)}")
    if args.dry_run:
        return dry_run(ops)
    if not torch.cuda.is_available():
        print("no GPU here; try --dry-run", file=sys.stderr)
        return 1
    end = time.monotonic() + args.seconds
    table = Table(args.out, environment())
    found, reason = stage("roof", 60.0)
    roof = found[0]["roof"] if found else None
    print(f"measured read bandwidth {roof / 1e12:.2f} TB/s" if roof else f"no roof: {reason}")
    checked = examine_all(ops, table, args.seconds / 3, args.workers)
    for i, op in enumerate(() if args.gate_only else ops):
        left = end - time.monotonic()
        if left < 10:
            table.add(op=op, metric="gate", note="there was no time left for this op")
            continue
        share = SHARES.get(op, 1) / sum(SHARES.get(o, 1) for o in ops[i:])
        run_op(op, checked[op], table, roof, left * share, impls)
    show(table.rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
