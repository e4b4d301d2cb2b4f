"""Time the kernels against the best 16-bit baseline of the same run.

    python kernels/bench/run.py --seconds 480          # on a GPU; appends to results.csv
    python kernels/bench/run.py --dry-run              # anywhere: tiny shapes, no timing, no file

Order: the correctness gate (probes, then each Triton result against the reference), the measured
read bandwidth, parallel compilation, then timing by CUDA-graph replay over rotating inputs. No case
starts that would not end in time.
"""

import argparse
import csv
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

from cases import OPS, Case, build, cases, tensors  # noqa: E402

from kvsearch_kernels.trust import prove  # noqa: E402

COLUMNS = (
    "op", "impl", "model", "batch", "context", "variant", "dtype", "metric", "unit",
    "p20", "p50", "p80", "gpu", "driver", "torch", "triton", "commit",
)  # fmt: skip
SETS = 4  # input sets in rotation; caches of 60 MB must not hold what is read next
CASE_SECONDS = 8.0  # what a case may take, compiled; none is started with less left


@contextmanager
def poisoned() -> Iterator[None]:
    """Let `torch.empty` return NaN (integers: 0x7F), so that what is never written shows."""
    real = torch.empty

    def empty(*size: Any, **options: Any) -> Tensor:
        made: Tensor = real(*size, **options)
        return made.fill_(float("nan") if made.is_floating_point() else 0x7F)

    torch.empty = empty  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.empty = real


def gate(todo: Sequence[Case]) -> None:
    """Raise unless Triton agrees with the reference on fresh small data, in 16-bit accuracy.

    First the probes that `auto` goes by, then the shapes of the cases, cut short. Whatever a kernel
    leaves unwritten, its output or its scratch, is NaN.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    for name in sorted({c.op for c in todo}):
        with poisoned():
            reason = prove(OPS[name], "triton", device, torch.float16)
        if reason is not None:
            raise RuntimeError(f"{name}: Triton does not pass its probe: {reason}")
    for case in {(c.op, c.model.name, c.variant): c for c in todo}.values():
        runs = build(case, "cuda", 1234, tiny=True).runs
        if "triton" not in runs:
            raise RuntimeError(f"{case.label}: no Triton implementation can run")
        with poisoned():
            found = tensors(runs["triton"]())
        for got, want in zip(found, tensors(runs["reference"]()), strict=True):
            got, want = got.double(), want.double()
            if case.op == "quantize_kv":  # division may round differently: a code off by one
                bad = (got != want).double().mean() > 0.02
            else:
                bad = not torch.allclose(got, want, rtol=2e-2, atol=2e-2)
            if bad or not torch.equal(got.isfinite(), want.isfinite()):
                raise RuntimeError(f"{case.label}: Triton differs from the reference")


def compile_case(case: Case) -> str:
    """Fill Triton's cache on disk; run in a process of its own."""
    runs = build(case, "cuda", 0, tiny=True).runs
    if "triton" in runs:
        runs["triton"]()
        torch.cuda.synchronize()
    return case.label


def precompile(todo: Sequence[Case], workers: int) -> None:
    """Compile what `todo` needs in parallel; kernels depend on neither batch nor context."""
    distinct = list({(c.op, c.model.name, c.variant): c for c in todo}.values())
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_case, distinct))


def time_runs(runs: Sequence[Callable[[], Any]], seconds: float) -> list[float]:
    """Milliseconds a call, of CUDA graphs that are replayed in turn."""
    graphs = []
    for run in runs:
        for _ in range(3):
            run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        graphs.append(graph)
    times: list[float] = []
    end = time.monotonic() + seconds
    while len(times) < 20 or (time.monotonic() < end and len(times) < 400):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for graph in graphs:
            graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / len(graphs))
    return times


def read_roof() -> float:
    """Bytes per second that a plain sum over 4 GiB reads."""
    x = torch.ones(1 << 30, device="cuda")
    times = time_runs([lambda: x.sum()], 1.0)
    return x.nbytes / median(times) * 1e3


def environment() -> dict[str, str]:
    """What every row records."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HERE,
        check=False,
    ).stdout.strip()  # fmt: skip
    found = {"torch": torch.__version__, "commit": commit, "gpu": "", "driver": "", "triton": ""}
    if torch.cuda.is_available():
        import triton

        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        text = subprocess.run(query, capture_output=True, text=True, check=False).stdout
        name, _, driver = text.splitlines()[0].partition(", ") if text else ("", "", "")
        found |= {"gpu": name, "driver": driver, "triton": triton.__version__}
    return found


def measure(case: Case, roof: float, seconds: float, env: dict[str, str]) -> list[dict[str, str]]:
    """Rows of one case: milliseconds and share of the read bandwidth of each implementation."""
    sets = [build(case, "cuda", seed, tiny=False) for seed in range(SETS)]
    rows = []
    names = [name for name in sets[0].runs if name != "reference"]
    for name in names:
        times = time_runs([s.runs[name] for s in sets], seconds / len(names))
        p20, _, _, p80 = quantiles(times, n=5)
        spread = (p20, median(times), p80)
        shared = {
            "op": case.op, "impl": name, "model": case.model.name, "batch": str(case.batch),
            "context": str(case.context), "variant": case.variant, "dtype": "float16", **env,
        }  # fmt: skip
        share = [sets[0].nbytes / ms * 1e3 / roof for ms in reversed(spread)]
        for metric, unit, values in (("time", "ms", spread), ("of read roof", "1", share)):
            numbers = dict(zip(("p20", "p50", "p80"), (f"{v:.5g}" for v in values), strict=True))
            rows.append(shared | {"metric": metric, "unit": unit} | numbers)
    return rows


def show(table: Sequence[dict[str, str]], roof: float) -> None:
    """Print the medians, with the speed against the best 16-bit baseline of the same shape."""

    def shape(row: dict[str, str]) -> tuple[str, ...]:
        return tuple(row[c] for c in ("op", "model", "batch", "context"))

    best: dict[tuple[str, ...], float] = {}
    for row in table:
        if row["impl"] in ("sdpa", "flex", "flash-attn") and row["metric"] == "time":
            best[shape(row)] = min(best.get(shape(row), float("inf")), float(row["p50"]))
    print(f"measured read bandwidth {roof / 1e12:.2f} TB/s")
    for row in table:
        name = " ".join((*shape(row), row["variant"]))
        line = f"{name:60} {row['impl']:10} {row['metric']:12} {row['p50']:>10} {row['unit']}"
        if row["metric"] == "time" and shape(row) in best:
            line += f"  {best[shape(row)] / float(row['p50']):.2f}x the best baseline's speed"
        print(line)


def dry_run() -> int:
    """Build every distinct case at a tiny shape on the CPU and check that results are finite."""
    distinct = {(c.op, c.model.name, c.variant): c for c in cases()}.values()
    for case in distinct:
        for name, run in build(case, "cpu", 0, tiny=True).runs.items():
            with poisoned():
                found = tensors(run())
            for x in found:
                if not x.isfinite().all():
                    raise RuntimeError(f"{case.label}: {name} is not finite")
    print(f"dry run: {len(distinct)} cases ran on the CPU at tiny shapes; nothing was timed")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=480.0, help="stop starting cases in time")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU, no timing")
    parser.add_argument("--only", default="", help="cases whose label contains this")
    parser.add_argument("--workers", type=int, default=12, help="processes that compile")
    parser.add_argument("--out", type=Path, default=HERE / "results.csv")
    args = parser.parse_args(argv)
    if args.dry_run:
        return dry_run()
    if not torch.cuda.is_available():
        print("no GPU here; try --dry-run", file=sys.stderr)
        return 1
    end = time.monotonic() + args.seconds
    todo = [c for c in cases() if args.only in c.label]
    precompile(todo, args.workers)
    gate(todo)
    roof, env, table = read_roof(), environment(), []
    new = not args.out.exists()
    with args.out.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if new:
            writer.writeheader()
        for case in todo:
            if time.monotonic() + CASE_SECONDS > end:
                print(f"out of time before {case.label}", file=sys.stderr)
                break
            try:
                rows = measure(case, roof, CASE_SECONDS / 4, env)
            except torch.OutOfMemoryError:
                print(f"does not fit: {case.label}", file=sys.stderr)
                torch.cuda.empty_cache()
                continue
            writer.writerows(rows)
            file.flush()
            table += rows
    show(table, roof)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
