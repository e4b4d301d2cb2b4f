"""Time decoding with a whole model: a policy's deployed cache against the full cache.

    python kernels/bench/end_to_end.py --out speed.csv           # on a GPU
    python kernels/bench/end_to_end.py --dry-run                 # anywhere: a tiny model, no timing

The model has the shape of a 7B Llama and random weights: what a token costs does not depend on
them. Each number of sequences and length of prompt is a process of its own with a time limit, in
which the caches take turns; one that does not fit is skipped with a message, and after one that
fails a new process goes on. Random weights give flat attention, so the choice of slots has no
meaning here.
"""

import argparse
import csv
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
for folder in (HERE, HERE.parent, HERE.parents[1]):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import torch  # noqa: E402
from run import child, environment  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402
from worker import emit, sentence  # noqa: E402

from kvsearch.cache.cuda_graphs import Decoded, cuda_graphs  # noqa: E402
from kvsearch.cache.huggingface import PolicyCache, full_cache  # noqa: E402
from kvsearch.models.shape import shape_of  # noqa: E402
from kvsearch.policy import Policy, Quantizer, Tier, layout  # noqa: E402
from kvsearch.rules import Attention  # noqa: E402

COLUMNS = (
    "cache", "batch", "context", "prefill_s", "ms", "tokens_per_s", "resident_bytes",
    "prefill_peak_bytes", "replayed", "note",
    "gpu", "driver", "torch", "triton", "commit",
)  # fmt: skip
WARM_PROMPT = 1536  # more than policies hold, so that a compaction is among what is made ready
BLOCKS = 5  # timed; a block is an interval of the policy, so that each has one compaction
INTERVAL = 16
WARM = INTERVAL + 8  # tokens before the clock starts; by then graphs were compared with launches
GRAPHS = ", graphs"  # after a cache's name: its tokens are replays of CUDA graphs
_FOUR = (Tier(key_bits=4, value_bits=4),)
_ROTATED = Quantizer(levels="lloyd", rotate=True, fp16_sinks=True)
# None is the full cache of transformers; the others resemble policies found by searches
CACHES: dict[str, Policy | None] = {
    "full": None,
    "window+rotated4": Policy(
        slots=1024, sinks=4, interval=INTERVAL, tiers=_FOUR, quantizer=_ROTATED
    ),
    "scored+rotated4": Policy(
        slots=1024, sinks=4, recent_window=64, interval=INTERVAL, tiers=_FOUR, quantizer=_ROTATED,
        rule=Attention(beta=1),
    ),
}  # fmt: skip
NAMES = [*CACHES, *(name + GRAPHS for name in CACHES)]
LLAMA_7B = {
    "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000,
}  # fmt: skip
TINY = {
    "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 50,
}  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """One cache, a number of sequences and the length of their prompt."""

    cache: str
    batch: int
    context: int

    @property
    def policy(self) -> Policy | None:
        """What the cache holds; None is the full cache of transformers."""
        return CACHES[self.cache.removesuffix(GRAPHS)]

    @property
    def graphs(self) -> bool:
        """Whether tokens are replayed; then a full cache is ours, with room in its tensors."""
        return self.cache.endswith(GRAPHS)


# tokens of a prompt, and sequences
CELLS = tuple((context, batch) for context in (4096, 32768) for batch in (1, 8, 32))


def config(sizes: dict[str, int]) -> LlamaConfig:
    """Config of a Llama whose positions reach every context."""
    return LlamaConfig(**sizes, max_position_embeddings=65536)


def bytes_needed(at: Setting, sizes: dict[str, int], policy: Policy | None) -> int:
    """About the most memory that a setting takes: weights, cache, and activations of the prompt."""
    h, f, n = sizes["hidden_size"], sizes["intermediate_size"], sizes["num_hidden_layers"]
    weights = 2 * (n * (4 * h * h + 3 * h * f) + 2 * h * sizes["vocab_size"])
    shape = shape_of(config(sizes))
    cache = at.batch * layout(policy or Policy(), shape).bytes_at(at.context)
    cache *= 2 if at.graphs else 1  # a copy of it computes what the first replays are compared with
    return weights + cache + at.batch * at.context * 2 * (3 * f + 6 * h)


def why_not(at: Setting, sizes: dict[str, int], free: int) -> str | None:
    """Reason why a setting is skipped where `free` bytes of memory are left, or None."""
    needed = bytes_needed(at, sizes, at.policy)
    if needed <= free:
        return None
    return f"it needs about {needed / 1e9:.0f} GB, and {free / 1e9:.0f} GB are free"


def built(sizes: dict[str, int], device: str) -> LlamaForCausalLM:
    """The model, in bf16 on a GPU."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        return LlamaForCausalLM._from_config(config(sizes), dtype=dtype).eval()


def measure(at: Setting, model: LlamaForCausalLM, slots: int | None = None) -> dict[str, Any]:
    """Prefill and decode once.

    Args:
        at: the setting.
        model: as `built`.
        slots: that policies hold instead of theirs.

    Returns:
        Seconds of the prefill, milliseconds a decoded token of each block, resident bytes, bytes
        allocated at most in the prefill beyond what was there, and which share of the timed tokens
        were replays.
    """
    device = model.device.type
    ids = torch.randint(0, model.config.vocab_size, (at.batch, at.context), device=device)
    policy = at.policy or (Policy() if at.graphs else None)
    if policy is not None and policy.slots is not None and slots is not None:
        policy = policy.model_copy(update={"slots": slots, "recent_window": 0})

    def made() -> Any:
        return full_cache(model) if policy is None else PolicyCache(policy, model, packed=True)

    def seconds(cache: Any, tokens: torch.Tensor, steps: int) -> float:
        _wait(device)
        start = time.perf_counter()
        for _ in range(steps):
            # logits of the last token alone: those of a prompt would be larger than the cache
            model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        _wait(device)
        return time.perf_counter() - start

    replays = cuda_graphs(model) if at.graphs else nullcontext(Decoded())
    with torch.inference_mode(), replays as decoded:
        first = made()  # kernels are proved and compiled, and libraries loaded, before the clock
        for tokens, steps in ((ids[:, :WARM_PROMPT], 1), (ids[:, :1], INTERVAL + 1)):
            seconds(first, tokens, steps)
        del first
        cache, peak = made(), 0  # bytes; torch counts none on a CPU
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            peak = -torch.cuda.memory_allocated()
        prefill = seconds(cache, ids, 1)
        if device == "cuda":
            peak += torch.cuda.max_memory_allocated()
        seconds(cache, ids[:, :1], WARM)
        before = decoded.repeated
        ms = [seconds(cache, ids[:, :1], INTERVAL) / INTERVAL * 1e3 for _ in range(BLOCKS)]
        replayed = (decoded.repeated - before) / (BLOCKS * INTERVAL)
    if policy is None:
        seen = at.context + WARM + BLOCKS * INTERVAL
        resident = layout(Policy(), shape_of(model.config)).bytes_at(seen)
    else:
        resident = cache.bytes_resident
    return {"prefill_s": prefill, "ms": ms, "resident": resident, "peak": peak,
            "replayed": replayed}  # fmt: skip


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def cell(context: int, batch: int, caches: Sequence[str]) -> None:
    """Some caches on the GPU of this process; hands their rows to the parent."""
    free = torch.cuda.mem_get_info()[0]
    model = None
    for cache in caches:
        at = Setting(cache, batch, context)
        try:
            found = {"reason": why_not(at, LLAMA_7B, free)}
            if found["reason"] is None:
                model = model or built(LLAMA_7B, "cuda")
                found = measure(at, model)
        except torch.OutOfMemoryError:
            found = {"reason": "it does not fit into the memory of the device"}
        except Exception as error:
            found = {"reason": sentence(error)}
        emit(cache=cache, **found)
        if "CUDA error" in (found.get("reason") or ""):
            return  # nothing more runs in this process
        torch.cuda.empty_cache()


def rows_of(context: int, batch: int, caches: Sequence[str], limit: float) -> Iterator[Any]:
    """What each cache gave in a cell; a new process goes on after one that failed."""
    todo = [*caches]
    while todo:
        asked = json.dumps({"context": context, "batch": batch, "caches": todo})
        rows, died = child([sys.executable, __file__, "--cell", asked], limit)
        if len(rows) < len(todo) and not (rows and "CUDA error" in str(rows[-1].get("reason"))):
            rows.append({"cache": todo[len(rows)], "reason": died or "it said nothing"})
        yield from rows
        todo = todo[len(rows) :]


def dry_run() -> int:
    """Every cache with a tiny model on the CPU."""
    model = built(TINY, "cpu")
    for cache in NAMES:
        for context, batch in ((40, 1), (70, 2)):
            found = measure(Setting(cache, batch, context), model, slots=32)
            if found["resident"] <= 0 or len(found["ms"]) != BLOCKS:
                raise RuntimeError(f"{cache}: {found}")
    print(f"dry run: {len(NAMES)} caches decoded with a tiny model on the CPU; nothing was timed")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dry-run", action="store_true", help="a tiny model on the CPU, no timing")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds a process may take")
    parser.add_argument(
        "--cells",
        default=",".join(f"{t}x{b}" for t, b in CELLS),
        help="lengths of prompts and sequences, with commas between them",
    )
    parser.add_argument("--caches", default=";".join(NAMES), help="with semicolons between them")
    parser.add_argument("--out", type=Path, default=HERE / "end_to_end.csv")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.cell:
        cell(**json.loads(args.cell))
        return 0
    if args.dry_run:
        return dry_run()
    if not torch.cuda.is_available():
        print("no GPU here; try --dry-run", file=sys.stderr)
        return 1
    env = environment()
    cells = [tuple(map(int, x.split("x"))) for x in args.cells.split(",")]
    new = not args.out.exists()
    with args.out.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if new:
            writer.writeheader()
        for context, batch in cells:
            full = None
            for found in rows_of(context, batch, args.caches.split(";"), args.limit):
                row: dict[str, Any] = {"cache": found["cache"], "batch": batch, "context": context}
                line = f"{found['cache']:26} b{batch:<3} t{context:<6}"
                if "reason" in found:
                    row["note"] = found["reason"]
                    line += found["reason"]
                else:
                    ms = median(found["ms"])
                    row |= {"prefill_s": f"{found['prefill_s']:.4g}", "ms": f"{ms:.4g}",
                            "tokens_per_s": f"{batch / ms * 1e3:.4g}",
                            "resident_bytes": found["resident"],
                            "prefill_peak_bytes": found["peak"],
                            "replayed": f"{found['replayed']:.3g}"}  # fmt: skip
                    line += f"{ms:9.3f} ms a token, prefill {found['prefill_s']:.2f} s"
                    if found["cache"] == "full":
                        full = ms
                    elif full is not None:
                        line += f", {full / ms:.2f}x the full cache's speed"
                print(line, flush=True)
                writer.writerow(row | env)
                file.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
