"""Time the kernels against the best 16-bit baseline of the same run.

    python kernels/bench/run.py --seconds 480          # on a GPU; appends to results.csv
    python kernels/bench/run.py --dry-run              # anywhere: tiny shapes, no timing, no file

Order: the correctness gate (each Triton result against the reference on fresh data), the measured
read bandwidth, parallel compilation, then timing by CUDA-graph replay over rotating inputs. No case
starts that would not end in time.
"""

import argparse
import csv
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).parent
if str(HERE.parent) not in sys.path:
    sys.path.insert(0, str(HERE.parent))

from kvsearch_kernels.decode_attention import Part, decode_attention  # noqa: E402
from kvsearch_kernels.gather_kv import gather_kv  # noqa: E402
from kvsearch_kernels.lifetime_attention import lifetime_attention  # noqa: E402
from kvsearch_kernels.quantize_kv import Format, quantize_kv  # noqa: E402
from kvsearch_kernels.score_keys import score_keys  # noqa: E402

NEVER = 1 << 40
COLUMNS = (
    "op", "impl", "model", "batch", "context", "variant", "dtype", "metric", "unit",
    "p20", "p50", "p80", "gpu", "driver", "torch", "triton", "commit",
)  # fmt: skip
SETS = 4  # input sets in rotation; caches of 60 MB must not hold what is read next
CASE_SECONDS = 8.0  # what a case may take, compiled; none is started with less left


@dataclass(frozen=True)
class Heads:
    """Heads of one layer of a model."""

    name: str
    queries: int
    keys: int
    dim: int


MODELS = (
    Heads("llama2-7b", 32, 32, 128),
    Heads("llama3-8b", 32, 8, 128),
    Heads("smollm2-135m", 9, 3, 64),
)
# share of tokens and bits of keys and values of each part
TIERS: dict[str, tuple[tuple[float, int], ...]] = {
    "16": ((1.0, 16),),
    "8": ((1.0, 8),),
    "4": ((1.0, 4),),
    "2": ((1.0, 2),),
    "1": ((1.0, 1),),
    "20%4+80%1": ((0.2, 4), (0.8, 1)),
    "1%16+20%4+79%1": ((0.01, 16), (0.2, 4), (0.79, 1)),
}


@dataclass(frozen=True)
class Case:
    """One op at one shape.

    Attributes:
        op: what is timed.
        model: heads.
        batch: sequences.
        context: tokens.
        variant: bits, budget or window.
    """

    op: str
    model: Heads
    batch: int
    context: int
    variant: str

    @property
    def label(self) -> str:
        """For tables."""
        return f"{self.op} {self.model.name} b{self.batch} t{self.context} {self.variant}"


@dataclass(frozen=True)
class Work:
    """Callables that do the same, by implementation, and the bytes that one call must read."""

    runs: dict[str, Callable[[], Any]]
    nbytes: int


def cases() -> Iterator[Case]:
    """All cases, most wanted first."""
    for model in MODELS:
        for context, batch in ((32768, 8), (4096, 1), (32768, 1), (4096, 32), (131072, 1)):
            for variant in TIERS:
                yield Case("decode_attention", model, batch, context, variant)
    for model in MODELS:
        for context, budget in ((4096, 0), (16384, 1024), (16384, 0), (32768, 1024)):
            yield Case("lifetime_attention", model, 1, context, str(budget or "full"))
        yield Case("score_keys", model, 1, 4096, "last64")
        yield Case("quantize_kv", model, 8, 64, "4")
        yield Case("gather_kv", model, 8, 4096, "turn")


def build(case: Case, device: str, seed: int, *, tiny: bool) -> Work:
    """Fresh inputs and the callables over them."""
    torch.manual_seed(seed)
    m = case.model
    B, T = (1, 96) if tiny else (case.batch, case.context)
    dtype = torch.float16 if device == "cuda" else torch.float32

    def data(heads: int, n: int) -> Tensor:
        return torch.randn(B, heads, n, m.dim, device=device, dtype=dtype)

    scale = m.dim**-0.5
    if case.op == "decode_attention":
        return _decode(case, data, T, scale, baseline=case.variant == "16")
    if case.op in ("lifetime_attention", "score_keys"):
        q, k, v = data(m.queries, T), data(m.keys, T), data(m.keys, T)
        birth = torch.arange(T, device=device)
        death = torch.full_like(birth, NEVER)
        if case.op == "lifetime_attention":
            if case.variant != "full":
                death = birth + (8 if tiny else int(case.variant))
            args = (q, k, v, birth, death)
            runs = _impls(lifetime_attention, args, {"first_query": 0, "scale": scale})
            runs["sdpa"] = lambda: torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=True
            )
            return Work(runs | _flash(q, k, v, scale), _size(q, k, v))
        w = min(64, T)
        last = q[:, :, T - w :]
        lse = torch.full((B, m.queries, w), 10.0, device=device)
        weights = torch.ones(w, device=device)
        first = {"first_query": T - w, "scale": scale}
        return Work(_impls(score_keys, (last, k, lse, weights, birth, death), first), _size(k))
    if case.op == "quantize_kv":
        x = data(m.keys, T)
        fmt = Format(int(case.variant), m.dim)
        return Work(_impls(quantize_kv, (x, fmt), {}), _size(x))
    x = data(m.keys, T)
    kept = torch.randperm(T, device=device)[: T // 2].sort().values
    by = torch.arange(T // 2, device=device) - kept
    inv_freq = 1e4 ** (-torch.arange(m.dim // 2, device=device) / (m.dim // 2))
    runs = _impls(gather_kv, (x, kept), {"by": by, "inv_freq": inv_freq})
    return Work(runs, _size(x) // 2)


def _decode(
    case: Case, data: Callable[[int, int], Tensor], T: int, scale: float, *, baseline: bool
) -> Work:
    m = case.model
    q = data(m.queries, 1)
    parts, nbytes, raw = [], 0, []
    for share, bits in TIERS[case.variant]:
        n = max(1, round(share * T))
        k, v = data(m.keys, n), data(m.keys, n)
        if bits == 16:
            parts.append(Part(k, v))
            raw.append((k, v))
            nbytes += _size(k, v)
        else:
            fmt = Format(bits, m.dim)
            pk, pv = quantize_kv(k, fmt), quantize_kv(v, fmt)
            parts.append(Part(pk, pv, fmt, fmt))
            nbytes += pk.nbytes + pv.nbytes
    runs = _impls(decode_attention, (q.squeeze(2), parts), {"scale": scale})
    if baseline:
        ((k, v),) = raw
        runs["sdpa"] = lambda: torch.nn.functional.scaled_dot_product_attention(
            q, k, v, scale=scale, enable_gqa=True
        )
        runs |= _flash(q, k, v, scale)
    return Work(runs, nbytes)


os.environ["KVSEARCH_TRITON"] = "1"  # this script is the gate that `auto` waits for


def _impls(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """The reference, and Triton where it can run."""
    runs: dict[str, Callable[[], Any]] = {"reference": lambda: op.run("reference", *args, **kwargs)}
    if op.pick(*args, **kwargs) == "triton":
        runs["triton"] = lambda: op.run("triton", *args, **kwargs)
    return runs


def _flash(q: Tensor, k: Tensor, v: Tensor, scale: float) -> dict[str, Callable[[], Any]]:
    """Compiled FlexAttention and flash-attn, where they can run."""
    if not q.is_cuda:
        return {}
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    runs: dict[str, Callable[[], Any]] = {}
    mask = None
    if q.shape[2] > 1:
        n = q.shape[2]
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, n, n, device="cuda")
    flex = torch.compile(flex_attention)
    runs["flex"] = lambda: flex(q, k, v, block_mask=mask, scale=scale, enable_gqa=True)
    try:
        from flash_attn import flash_attn_func
    except ImportError:
        return runs
    turned = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    runs["flash-attn"] = lambda: flash_attn_func(*turned, softmax_scale=scale, causal=True)
    return runs


def _size(*tensors: Tensor) -> int:
    return sum(x.nbytes for x in tensors)


def _tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, tuple):
        return list(result)
    return [result.codes, result.scales]


def gate(todo: Sequence[Case]) -> None:
    """Raise unless Triton agrees with the reference on fresh small data, in 16-bit accuracy."""
    for case in {(c.op, c.model.name, c.variant): c for c in todo}.values():
        runs = build(case, "cuda", 1234, tiny=True).runs
        if "triton" not in runs:
            raise RuntimeError(f"{case.label}: no Triton implementation can run")
        pairs = zip(_tensors(runs["triton"]()), _tensors(runs["reference"]()), strict=True)
        for got, want in pairs:
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
            for x in _tensors(run()):
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
