"""torch's default dtype and device, which scripts of users set, change no number of kvsearch.

Compiled loops read and write memory by its address: a tensor of another type corrupted the heap.
So everything runs in processes of its own, once with torch's defaults and once with each other.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import partial
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvsearch.cache import PolicyCache
from kvsearch.evaluation.evaluator import Evaluator
from kvsearch_kernels.codebooks import CODEBOOKS
from kvsearch_kernels.op import UnsupportedError
from kvsearch_kernels.quantize_kv import Format, dequantize_kv, fake_quantize, quantize_kv

ROOT = Path(__file__).resolve().parents[2]
DEFAULTS = ("float32", "bfloat16", "meta")
METHODS = [
    *("lacache", "h2o", "snapkv-prompt", "kivi4", "expected-attention", "three tiers"),
    *("fp8 by rank, re-indexed", "key-norm in uneven heads"),
]


def numbers(x: Any) -> Iterator[bytes]:
    """Every tensor in `x`, with its type and shape."""
    if isinstance(x, torch.Tensor):
        yield f"{x.dtype} {tuple(x.shape)}".encode()
        yield x.detach().contiguous().view(torch.uint8).numpy().tobytes()
    elif isinstance(x, dict):
        yield from numbers(list(x.values()))
    elif isinstance(x, list | tuple):
        for y in x:
            yield from numbers(y)
    elif is_dataclass(x):
        yield from numbers([getattr(x, f.name) for f in fields(x) if f.init and f.name != "kept"])


def of_ops() -> Iterator[tuple[str, str]]:
    """What each implementation of each op returns, and leaves in its arguments."""
    sys.path.insert(0, str(ROOT / "tests" / "kernels"))
    ops = import_module("test_references").OPS
    cpu = torch.device("cpu")
    for op in ops:
        if op.probe is None:
            continue
        probe = import_module(op.probe)
        for dtype in (torch.float32, torch.bfloat16):
            for impl in ("reference", *op.impls):
                found = sha256()
                for args, kwargs in probe.cases(cpu, dtype):
                    try:
                        out = op.run(impl, *args, **kwargs)
                    except UnsupportedError:
                        continue
                    for data in numbers([out, args]):
                        found.update(data)
                yield f"{op.name} {impl} {dtype}", found.hexdigest()
    draw = torch.Generator("cpu").manual_seed(0)
    x = torch.randn(1, 2, 9, 64, generator=draw, dtype=torch.float32, device=cpu)
    for levels, book in CODEBOOKS.items():
        for bits in book.bits:
            fmt = Format(bits, book.group or 32, levels, rotate=True)
            packed = quantize_kv(x, fmt)
            every = [packed, dequantize_kv(packed, fmt), fake_quantize(x, fmt)]
            yield f"{levels} {bits}", sha256(b"".join(numbers(every))).hexdigest()


def of_caches(models: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Generated tokens, bytes, and losses of policies."""
    from tests.cache_cases import IDS, head_dim, policy_of

    more: dict[str, Any] = dict(
        max_new_tokens=9, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    ids = torch.from_numpy(IDS[:1])
    more["attention_mask"] = torch.ones_like(ids[:, :75])  # a 0 among them is no padding
    for name in METHODS:
        policy = policy_of(name)
        for dtype in (torch.float32, torch.bfloat16):
            loaded = models[head_dim(name), dtype]
            cache = PolicyCache(policy, loaded.model)
            text = loaded.model.generate(ids[:, :75], past_key_values=cache, **more)
            loss = Evaluator(loaded).quality(policy, IDS[:1, :130], prompt=75)
            seen = [*text[0].tolist(), cache.bytes_resident, loss.bytes_resident]
            yield f"{name} {dtype}", [seen, loss.nll.tolist()]


def main(default: str) -> None:
    """Print what comes out with a default."""
    if default == "meta":
        torch.set_default_device("meta")
        print(json.dumps(dict(of_ops())))
        return
    from tests.cache_cases import tiny

    kinds = [(D, dtype) for D in (16, 32) for dtype in (torch.float32, torch.bfloat16)]
    models = {(D, dtype): tiny(head_dim=D, dtype=dtype) for D, dtype in kinds}
    torch.set_default_dtype(getattr(torch, default))
    print(json.dumps({**dict(of_ops()), **dict(of_caches(models))}))


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    """By default, what comes out; the processes run side by side."""
    start = partial(subprocess.Popen, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    code = "from tests.cache.test_default_types import main; main({!r})"
    every = {x: start([sys.executable, "-c", code.format(x)]) for x in DEFAULTS}
    said = {x: process.communicate()[0] for x, process in every.items()}
    assert {x: process.returncode for x, process in every.items()} == dict.fromkeys(DEFAULTS, 0)
    return {x: json.loads(text.splitlines()[-1]) for x, text in said.items()}


def every_op_and_codebook() -> set[str]:
    """Names of all that `of_ops` has to bring."""
    sys.path.insert(0, str(ROOT / "tests" / "kernels"))
    ops = [op for op in import_module("test_references").OPS if op.probe is not None]
    types = (torch.float32, torch.bfloat16)
    found = {f"{op.name} {i} {t}" for op in ops for i in ("reference", *op.impls) for t in types}
    return found | {f"{name} {bits}" for name, book in CODEBOOKS.items() for bits in book.bits}


@pytest.mark.slow
@pytest.mark.parametrize("default", DEFAULTS[1:])
def test_defaults_of_torch_change_nothing(default: str, found: dict[str, Any]) -> None:
    want, got = found["float32"], found[default]
    assert set(got) >= every_op_and_codebook()
    for name, result in got.items():
        if isinstance(result, str):
            assert result == want[name], name
        else:
            assert result[0] == want[name][0], name
            assert np.abs(np.subtract(result[1], want[name][1])).max() < 1e-4, name
