"""What an exact evaluation costs, and how exact it is, on the real default model.

    python studies/2026-11-evaluation-cost/measure.py [--exact|--half|--products|--slices|...]

Cost: CPU seconds of one thread for `Evaluator.quality`, divided by those of one plain full-cache
forward of the same tokens with the same head, in interleaved pairs; the median pair is kept.
CPU seconds, because wall seconds of a shared machine measure its other users. Exactness: largest
per-token difference between the one-pass replay and a deployed cache filled token by token; half:
the same in bfloat16, of five policies, with the mean size.
Products: CPU seconds with all products of weights by MKL, and with all large ones by oneDNN,
divided by those as kvsearch chooses on this processor.
Slices: CPU seconds with logits of 512 tokens at a time, divided by those with as many as it is.
Loop: CPU seconds without the compiled loop for policies that compact at every token, divided by
those with it.
Choose: CPU seconds with slots chosen by torch at compactions, divided by those with a loop.
Rows are appended to results.csv beside this file as they are measured.
"""

import csv
import platform
import time
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import click
import numpy as np
import torch
from torch import nn

from kvsearch.evaluation.evaluator import Evaluator, stepwise
from kvsearch.models import head, load_model
from kvsearch.models.products import SIZE, OneDnnLinear
from kvsearch.policy import Policy
from kvsearch.policy_space import Setting, Value, build
from kvsearch.policy_space.methods import METHODS, at
from kvsearch.workloads.text import builtin, read_file, tokenize, windows
from kvsearch_kernels.choose_slots import numba_impl
from kvsearch_kernels.evict_in_place import numba_impl as evicting

COSTED: dict[str, dict[str, Value]] = {
    "full": {"evict": False},
    "streamingllm": METHODS["streamingllm"].knobs,
    "window, original positions": {"sinks": 4},
    "lacache": METHODS["lacache"].knobs,
    "lacache, original positions": {**METHODS["lacache"].knobs, "positions": "original"},
    "window+int4, interval 16": {"sinks": 4, "interval": 16, "tiers": "k4v4"},
    "h2o, interval 32": {"rule": "h2o", "recent_window": 64, "interval": 32},
    "h2o+int4, interval 32": {"rule": "h2o", "recent_window": 64, "interval": 32, "tiers": "k4v4"},
    "xmu tiers, interval 64": {
        "rule": "xmu",
        "recent_window": 1,
        "interval": 64,
        "tiers": "xmu-0.4",
    },
    "snapkv, interval 32": METHODS["snapkv"].knobs,
    "h2o, interval 1": METHODS["h2o"].knobs,
    "tova, interval 1": METHODS["tova"].knobs,
    "xmu-evict, interval 1": METHODS["xmu-evict"].knobs,
}


HALF = ("full", "int4", "h2o", "h2o-cache", "xmu")


@click.command()
@click.option("--context", multiple=True, type=int, default=(2048, 8192))
@click.option("--pairs", default=3, show_default=True)
@click.option("--text", default=None, help="FILE or FILE:START-END; default: the built-in corpus")
@click.option("--only", multiple=True, help="a policy by its name; repeatable [default: all]")
@click.option("--exact", is_flag=True, help="also compare with token by token (minutes)")
@click.option("--half", is_flag=True, help="compare with token by token in bfloat16 instead")
@click.option("--products", is_flag=True, help="compare MKL with oneDNN instead")
@click.option("--slices", is_flag=True, help="compare slices of logits instead")
@click.option("--loop", is_flag=True, help="compare torch with the loop for interval 1 instead")
@click.option("--choose", is_flag=True, help="compare torch with the loop that chooses slots")
def main(
    context: tuple[int, ...], pairs: int, text: str | None, only: tuple[str, ...], exact: bool,
    half: bool, products: bool, slices: bool, loop: bool, choose: bool,
) -> None:  # fmt: skip
    """Measure and append to results.csv."""
    torch.set_num_threads(1)
    loaded = load_model()
    evaluator = Evaluator(loaded)
    tokens = tokenize(loaded.tokenizer, read_file(text) if text else builtin())
    if half:
        return exactness(loaded, tokens, half=True)
    for T in context:
        ids = windows(tokens, count=1, length=T)
        setting = Setting(loaded.shape, loaded.shape.budget_bytes(256), T)
        plain(loaded, ids)
        for name, knobs in COSTED.items():
            if only and name not in only:
                continue
            if T > 4096 and knobs.get("rule", "none") != "none":
                continue  # the promise for long windows is about policies that decide by age
            policy = build(knobs, setting, name=name)
            if products:
                for what, ratios in slower(evaluator, policy, ids, pairs).items():
                    write(row(what, name, T, "fp32", float(np.median(ratios)), ratios))
                continue
            if slices:
                before = mock.patch.object(head, "ROWS", 512)
                ratios = [longer(evaluator, policy, ids, before) for _ in range(pairs)]
                write(row(f"512 / {head.ROWS}", name, T, "fp32", float(np.median(ratios)), ratios))
                continue
            if loop or choose:
                before = mock.patch.object(evicting, "why_not", lambda *_: "not now")
                if choose:
                    before = mock.patch.object(numba_impl, "why_not", lambda *_: "not now")
                evaluator.quality(policy, ids[:, :512], resident=False)  # compiles it
                ratios = [longer(evaluator, policy, ids, before) for _ in range(pairs)]
                what = "torch / loop" if loop else "torch / loop that chooses"
                write(row(what, name, T, "fp32", float(np.median(ratios)), ratios))
                continue
            ratios = []
            for _ in range(pairs):
                base = plain(loaded, ids)
                start = time.process_time()
                evaluator.quality(policy, ids, resident=False)
                ratios.append((time.process_time() - start) / base)
            write(row("cost ratio", name, T, "fp32", float(np.median(ratios)), ratios))
    if exact:
        exactness(loaded, tokens)


def plain(loaded, ids) -> float:
    """CPU seconds of the unmodified model over the same tokens, loss included."""
    head = Evaluator(loaded).head
    x = torch.from_numpy(ids)
    start = time.process_time()
    with torch.inference_mode():
        head.nll(head.body(x, use_cache=False).last_hidden_state, x)
    return time.process_time() - start


def slower(evaluator, policy, ids, pairs) -> dict[str, list[float]]:
    """CPU seconds of an evaluation by MKL and by oneDNN, divided by those with what is chosen."""
    model = evaluator.loaded.model
    layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
    chosen = [type(m) for m in layers]
    large = [OneDnnLinear if m.weight.numel() >= SIZE else nn.Linear for m in layers]
    kinds = {"MKL / chosen": [nn.Linear] * len(layers), "oneDNN / chosen": large, "": chosen}
    found: dict[str, list[float]] = {what: [] for what in kinds}
    for _ in range(pairs):
        for what, types in kinds.items():
            for layer, kind in zip(layers, types, strict=True):
                layer.__class__ = kind
            start = time.process_time()
            evaluator.quality(policy, ids, resident=False)
            found[what].append(time.process_time() - start)
    base = found.pop("")
    return {w: [x / y for x, y in zip(s, base, strict=True)] for w, s in found.items()}


def longer(evaluator, policy, ids, before) -> float:
    """CPU seconds as they were `before`, a patch, divided by those as they are."""
    seconds = []
    for patch in (before, nullcontext()):
        with patch:
            start = time.process_time()
            evaluator.quality(policy, ids, resident=False)
            seconds.append(time.process_time() - start)
    return seconds[0] / seconds[1]


def exactness(loaded, tokens, half=False):
    """Per-token |dNLL| to a deployed cache filled token by token: in fp32 and fp64, or bf16."""
    T = 768 if half else 128
    ids = windows(tokens, count=1, length=T)
    uneven = tuple(1.0 + i % 3 for i in range(loaded.shape.layers))  # any will do to be exact
    setting = Setting(loaded.shape, loaded.shape.budget_bytes(96), T, uneven)
    for dtype in (torch.bfloat16,) if half else (torch.float64, torch.float32):
        loaded.model.to(dtype)
        for name, method in METHODS.items():
            if not method.baseline and name not in ("int4", "h2o-cache", "xmu-0.4"):
                continue
            if half and name not in HALF:
                continue
            policy = Policy() if name == "full" else at(name, setting)
            slow, _ = stepwise(loaded, policy, ids)
            fast = Evaluator(loaded).quality(policy, ids, resident=False).nll
            gap = np.abs(slow - fast)
            write(row("max |dNLL|", name, T, str(dtype)[6:], float(gap.max()), []))
            if half:
                write(row("mean |dNLL|", name, T, str(dtype)[6:], float(gap.mean()), []))
            write(row("mean dNLL", name, T, str(dtype)[6:], float((fast - slow).mean()), []))
            if half:
                error = float((fast - slow).std(ddof=1) / gap.size**0.5)
                write(row("its standard error", name, T, str(dtype)[6:], error, []))


def row(what: str, name: str, T: int, dtype: str, value: float, spread: list[float]):
    """One tidy row, echoed."""
    click.echo(f"{what:<12} {name:<28} T={T:<6} {dtype:<8} {value:.3g}")
    return {
        "what": what, "policy": name, "context": T, "dtype": dtype, "value": f"{value:.4g}",
        "lowest": f"{min(spread):.4g}" if spread else "", "pairs": len(spread),
        "highest": f"{max(spread):.4g}" if spread else "",
        "threads": torch.get_num_threads(), "torch": torch.__version__,
        "machine": platform.machine(), "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


def write(row) -> None:
    """Append to results.csv."""
    file = Path(__file__).with_name("results.csv")
    new = not file.exists()
    with file.open("a", newline="") as f:
        out = csv.DictWriter(f, row.keys(), lineterminator="\n")
        if new:
            out.writeheader()
        out.writerow(row)


if __name__ == "__main__":
    main()
