"""`kvsearch eval`: named methods and policy files on one text, paired with the full cache."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from kvsearch.app import inputs
from kvsearch.app.progress import Shown
from kvsearch.errors import KvsearchError, nearest
from kvsearch.evaluate.quality import Evaluator, Quality, check_finite
from kvsearch.files import write_atomic
from kvsearch.knobs import Setting
from kvsearch.methods import METHODS, at
from kvsearch.policy import Policy, check, layout
from kvsearch.stats import paired, standard_error
from kvsearch.text import tokenize, windows


@dataclass(frozen=True)
class EvalOptions:
    """What `kvsearch eval` was asked; lengths in tokens, budget in fp16 slots per layer."""

    policies: tuple[str, ...]
    model: str = "smollm2-135m"
    budget: float | None = None
    files: tuple[str, ...] = ()
    dataset: str | None = None
    context: int = 2048
    windows: int = 1
    score_from: int | None = None
    prompt: int = 0
    dtype: str = "auto"
    device: str = "auto"
    batch: int = 1
    nll_out: Path | None = None


def resolve(names: tuple[str, ...], setting: Setting) -> list[Policy]:
    """Policies for method names and files, in order; files are named by their stem."""
    out = []
    for name in names:
        if name in METHODS:
            out.append(at(name, setting))
        elif Path(name).suffix == ".json":
            policy = Policy.from_json(name)
            out.append(policy.model_copy(update={"name": policy.name or Path(name).stem}))
        else:
            raise KvsearchError(
                f"{name!r} is neither a method nor a .json policy file{nearest(name, METHODS)}"
            )
        check(out[-1], setting.shape, prompt=setting.prompt)
    return out


def check_names(options: EvalOptions) -> None:
    """Mistakes that can be told before the model is loaded."""
    for name in options.policies:
        if Path(name).suffix == ".json":
            Policy.from_json(name)
        elif name not in METHODS:
            raise KvsearchError(
                f"{name!r} is neither a method nor a .json policy file{nearest(name, METHODS)}"
            )
        elif options.budget is None and METHODS[name].knobs.get("evict", True):
            raise KvsearchError(
                f"method {name} needs a size: give --budget in fp16 slots per layer"
            )


def run(options: EvalOptions, shown: Shown) -> dict[str, Any]:
    """Evaluate; returns the document that `--json` prints."""
    check_names(options)
    loaded = inputs.model(
        options.model,
        dtype=options.dtype,
        device=options.device,
        context=options.context,
        say=shown.say,
    )
    setting = inputs.setting(loaded, options.budget, options.context, options.prompt)
    policies = resolve(options.policies, setting)
    tokens = tokenize(loaded.tokenizer, inputs.source(options.files, options.dataset, shown.say))
    ids = windows(tokens, count=options.windows, length=options.context)
    start = options.score_from or int(options.budget or 1)
    if not 1 <= start < options.context:
        raise KvsearchError(f"--score-from {start} lies outside a window of {options.context}")
    evaluator = Evaluator(loaded, batch=options.batch)
    measured: list[tuple[Policy, Quality]] = []
    with shown.step("evaluate", len(policies) + 1) as step:
        full = evaluator.quality(Policy(name="full"), ids)
        step.advance()
        for policy in policies:
            quality = evaluator.quality(policy, ids, prompt=options.prompt)
            check_finite(policy.name or "policy", quality.nll)
            measured.append((policy, quality))
            step.advance(note=policy.name or "")
    if options.nll_out is not None:
        _write_nll(options.nll_out, measured, ids)
    return {
        "model": {
            "name": loaded.name,
            "digest": loaded.digest,
            "dtype": loaded.dtype,
            "device": loaded.device,
        },
        "text": {
            "name": tokens.name,
            "text_sha256": tokens.text_sha256,
            "token_sha256": tokens.token_sha256,
        },
        "tokens": int(full.nll[:, start - 1 :].size),
        "windows": options.windows,
        "context": options.context,
        "score_from": start,
        "full_nll": float(full.nll[:, start - 1 :].mean()),
        "results": [_result(p, q, full, setting, start) for p, q in measured],
    }


def _result(
    policy: Policy, quality: Quality, full: Quality, setting: Setting, start: int
) -> dict[str, Any]:
    nll = quality.nll[:, start - 1 :]
    mean = float(nll.mean())
    d = paired(nll, full.nll[:, start - 1 :])
    sizes = layout(policy, setting.shape)
    peak = sizes.bytes_peak(setting.tokens, setting.prompt)
    return {
        "policy": policy.name,
        "fingerprint": policy.fingerprint(setting.shape.layers),
        "nll": mean,
        "nll_se": standard_error(nll),
        "ppl": float(np.exp(mean)),
        "dnll_full": {"mean": d.mean, "lo": d.lo, "hi": d.hi},
        "bytes_peak": peak,
        "bytes_mean": sizes.bytes_mean(setting.tokens, setting.prompt),
        "bytes_asked": sizes.bytes_at(setting.tokens, setting.prompt),
        "bytes_resident": quality.bytes_resident,
        "slots16": peak / setting.shape.budget_bytes(1),
        "within_budget": None if setting.budget is None else peak <= setting.budget,
        "seconds": quality.seconds,
        "impls": quality.impls,
    }


def _write_nll(file: Path, measured: list[tuple[Policy, Quality]], ids: Any) -> None:
    """Per-token NLL: policy, window, pos, token, nll (nats)."""
    W, T = ids.shape
    n = W * (T - 1)
    names = [p.name for p, _ in measured for _ in range(n)]
    columns = {
        "policy": pa.array(names).dictionary_encode(),
        "window": np.tile(np.repeat(np.arange(W, dtype=np.int32), T - 1), len(measured)),
        "pos": np.tile(np.arange(1, T, dtype=np.int32), W * len(measured)),
        "token": np.tile(ids[:, 1:].astype(np.int32).ravel(), len(measured)),
        "nll": np.concatenate([q.nll.ravel() for _, q in measured]),
    }
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink, compression="zstd")
    write_atomic(file, sink.getvalue().to_pybytes())
