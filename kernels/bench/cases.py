"""What the benchmark times: each op at one shape, its implementations and its baselines."""

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

KERNELS = Path(__file__).parents[1]
if str(KERNELS) not in sys.path:
    sys.path.insert(0, str(KERNELS))

from kvsearch_kernels.decode_attention import Part, decode_attention  # noqa: E402
from kvsearch_kernels.gather_kv import gather_kv  # noqa: E402
from kvsearch_kernels.lifetime_attention import lifetime_attention  # noqa: E402
from kvsearch_kernels.op import Op  # noqa: E402
from kvsearch_kernels.quantize_kv import Format, quantize_kv  # noqa: E402
from kvsearch_kernels.score_keys import score_keys  # noqa: E402
from kvsearch_kernels.scored_decode import scored_decode  # noqa: E402

NEVER = 1 << 40


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
OPS: dict[str, Op[Any, Any]] = {
    op.name: op
    for op in (
        decode_attention, gather_kv, lifetime_attention, quantize_kv, score_keys, scored_decode
    )
}  # fmt: skip
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
        yield Case("lifetime_attention", model, 1, 4096, "anchors")
        yield Case("score_keys", model, 1, 4096, "last64")
        for variant in ("16", "4", "20%4+80%1"):
            yield Case("scored_decode", model, 8, 32768, variant)
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
    if case.op in ("decode_attention", "scored_decode"):
        return _decode(case, data, T, scale, baseline=case.variant == "16")
    if case.op in ("lifetime_attention", "score_keys"):
        q, k, v = data(m.queries, T), data(m.keys, T), data(m.keys, T)
        birth = torch.arange(T, device=device)
        death = torch.full_like(birth, NEVER)
        if case.op == "lifetime_attention":
            first: dict[str, Any] = {"first_query": 0, "scale": scale}
            if case.variant == "anchors":  # sequences of 32 tokens, each summed up by its last
                last_of = (birth // 32 + 1) * 32 - 1
                death = torch.where(birth == last_of, death, last_of + 1)
                first["anchors"] = torch.where(birth == last_of, birth, -1)
            elif case.variant != "full":
                death = birth + (8 if tiny else int(case.variant))
            runs = _impls(lifetime_attention, (q, k, v, birth, death), first)
            runs["sdpa"] = lambda: torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=True
            )
            return Work(runs | _flash(q, k, v, scale), size(q, k, v))
        w = min(64, T)
        last = q[:, :, T - w :]
        lse = torch.full((B, m.queries, w), 10.0, device=device)
        weights = torch.ones(w, device=device)
        first = {"first_query": T - w, "scale": scale}
        return Work(_impls(score_keys, (last, k, lse, weights, birth, death), first), size(k))
    if case.op == "quantize_kv":
        x = data(m.keys, T)
        fmt = Format(int(case.variant), m.dim)
        return Work(_impls(quantize_kv, (x, fmt), {}), size(x))
    x = data(m.keys, T)
    kept = torch.randperm(T, device=device)[: T // 2].sort().values
    by = torch.arange(T // 2, device=device) - kept
    inv_freq = 1e4 ** (-torch.arange(m.dim // 2, device=device) / (m.dim // 2))
    runs = _impls(gather_kv, (x, kept), {"by": by, "inv_freq": inv_freq})
    return Work(runs, size(x) // 2)


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
            nbytes += size(k, v)
        else:
            fmt = Format(bits, m.dim)
            pk, pv = quantize_kv(k, fmt), quantize_kv(v, fmt)
            parts.append(Part(pk, pv, fmt, fmt))
            nbytes += pk.nbytes + pv.nbytes
    runs = _impls(OPS[case.op], (q.squeeze(2), parts), {"scale": scale})
    if baseline:
        ((k, v),) = raw
        runs["sdpa"] = lambda: torch.nn.functional.scaled_dot_product_attention(
            q, k, v, scale=scale, enable_gqa=True
        )
        runs |= _flash(q, k, v, scale)
    return Work(runs, nbytes)


os.environ["KVSEARCH_TRITON"] = "1"  # `gate` in run.py asks for the proof itself, of every op


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


def size(*tensors: Tensor) -> int:
    """Bytes of all of them."""
    return sum(x.nbytes for x in tensors)


def tensors(result: Any) -> list[Tensor]:
    """What an op returned, one by one."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, tuple):
        return list(result)
    return [result.codes, result.scales]
