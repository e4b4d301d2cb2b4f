"""What the benchmark times: each op at one shape, its implementations and its baselines."""

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

KERNELS = Path(__file__).parents[1]
for place in (KERNELS, KERNELS / "bench"):
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))

import compactions  # noqa: E402
import steps  # noqa: E402

from kvsearch_kernels.decode_step import decode_step  # noqa: E402
from kvsearch_kernels.lifetime_attention import lifetime_attention  # noqa: E402
from kvsearch_kernels.op import Op  # noqa: E402
from kvsearch_kernels.quantize_kv import (  # noqa: E402
    Format,
    Packed,
    dequantize_kv,
    quantize,
    quantize_kv,
)
from kvsearch_kernels.scored_attention import scored_attention  # noqa: E402

NEVER = 1 << 40
os.environ["KVSEARCH_TRITON"] = "1"  # kernels are asked for by name, and compared before


@dataclass(frozen=True)
class Heads:
    """Heads of one layer of a model."""

    name: str
    queries: int
    keys: int
    dim: int


MODELS = (
    Heads("llama3-8b", 32, 8, 128),
    Heads("llama2-7b", 32, 32, 128),
    Heads("smollm2-135m", 9, 3, 64),
)
# in order of priority: ops of a decoded token, of a prompt, of a compaction
OPS: dict[str, Op[Any, Any]] = {
    op.name: op
    for op in (
        decode_step, lifetime_attention, scored_attention, quantize_kv, dequantize_kv,
        *compactions.OPS,
    )
}  # fmt: skip
# slots and sequences: what a policy holds of a long text, then what it is compared with
SHAPES = ((4096, 8), (32768, 8), (512, 1), (512, 8), (4096, 1), (32768, 1), (4096, 32), (131072, 1))


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
        """Name in tables."""
        return f"{self.op} {self.model.name} b{self.batch} t{self.context} {self.variant}"


@dataclass(frozen=True)
class Work:
    """One call of an op, its baselines, and the bytes that one call must read.

    `first` puts back what the call before has written.
    """

    op: Op[Any, Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    nbytes: int
    baselines: dict[str, Callable[[], Any]] = field(default_factory=dict)
    first: Callable[[], Any] = lambda: None

    def run(self, impl: str) -> Callable[[], Any]:
        """The implementation of that name, or the baseline."""

        def call() -> Any:
            self.first()
            return self.op.run(impl, *self.args, **self.kwargs)

        return self.baselines.get(impl) or call


def cases() -> Iterator[Case]:
    """All cases, in order of priority within an op."""
    for context, batch in SHAPES:
        for variant in steps.VARIANTS:
            for model in MODELS:
                yield Case("decode_step", model, batch, context, variant)
    for model in MODELS:
        for context, budget in ((4096, 0), (32768, 1024), (16384, 0), (4096, 512)):
            yield Case("lifetime_attention", model, 1, context, str(budget or "full"))
        yield Case("lifetime_attention", model, 1, 4096, "anchors")
        for context, rows in ((4096, "512"), (4096, "all"), (16384, "64")):
            yield Case("scored_attention", model, 1, context, rows)
        for form in ("r4", "4", "8"):
            yield Case("quantize_kv", model, 8, 64, form)
            yield Case("dequantize_kv", model, 8, 512, form)
        for op in compactions.OPS:
            for slots, batch, variant in compactions.shapes(op.name):
                yield Case(op.name, model, batch, slots, variant)


def build(
    case: Case, device: str, seed: int, *, tiny: bool, dtype: torch.dtype, peaked: bool = False
) -> Work:
    """Fresh inputs.

    Args:
        case: what to time.
        device: where.
        seed: of the random numbers.
        tiny: a short context, to check and to compile.
        dtype: of queries, keys and values.
        peaked: let the first key receive nearly all attention, with values close to zero, as
            attention sinks do; otherwise keys are Gaussian and attention is flat.
    """
    torch.manual_seed(seed)
    m = case.model
    B, T = (1, 96) if tiny else (case.batch, case.context)

    def data(heads: int, n: int) -> Tensor:
        return torch.randn(B, heads, n, m.dim, device=device, dtype=dtype)

    def pair(n: int) -> tuple[Tensor, Tensor]:
        k, v = data(m.keys, n), data(m.keys, n)
        if peaked:
            k[:, :, 0] = 13 * m.dim**-0.5
            v[:, :, 0] *= 2**-12
        return k, v

    def queries(n: int) -> Tensor:
        q = data(m.queries, n)
        return q / 4 + 1 if peaked else q

    scale = m.dim**-0.5
    if case.op == "decode_step":
        args, more, nbytes, first = steps.arguments(
            case.variant, queries(1).squeeze(2), pair, T, _packed
        )
        rest = {}
        if case.variant == "16":  # attention alone, to as many slots
            rest = _baselines(lambda: (queries(1), *pair(T)), scale)
        return Work(decode_step, args, more, nbytes, rest, first)
    if case.op in ("lifetime_attention", "scored_attention"):
        return _attend(case, queries(T), *pair(T), scale, tiny)
    if case.op in compactions.VARIANTS:
        fmt = steps.form(case.variant, m.dim) if case.op == "repack_kv" else None
        shared = m.queries // m.keys
        found = compactions.arguments(case.op, case.variant, fmt, pair, T, shared, _packed)
        return Work(OPS[case.op], *found)
    x = data(m.keys, T)
    fmt = steps.form(case.variant, m.dim)
    if case.op == "quantize_kv":
        return Work(quantize_kv, (x, fmt), {}, size(x))
    packed = _packed(x, fmt)
    return Work(dequantize_kv, (packed, fmt), {"dtype": dtype}, packed.nbytes)


def _attend(case: Case, q: Tensor, k: Tensor, v: Tensor, scale: float, tiny: bool) -> Work:
    T = q.shape[2]
    birth = torch.arange(T, device=q.device)
    death = torch.full_like(birth, NEVER)
    if case.op == "lifetime_attention":
        more: dict[str, Any] = {"first_query": 0, "scale": scale}
        if case.variant == "anchors":  # sequences of 32 tokens, each summed up by its last
            last_of = (birth // 32 + 1) * 32 - 1
            death = torch.where(birth == last_of, death, last_of + 1)
            more["anchors"] = torch.where(birth == last_of, birth, -1)
        elif case.variant != "full":
            death = birth + (8 if tiny else int(case.variant))
        # they attend to everything: once a context
        rest = _baselines(lambda: (q, k, v), scale) if case.variant in ("full", "1024") else {}
        return Work(lifetime_attention, (q, k, v, birth, death), more, size(q, k, v), rest)
    rows = T if case.variant == "all" else min(int(case.variant), T)
    last = q[:, :, T - rows :]
    weights = torch.ones(rows, device=q.device)
    return Work(scored_attention, (last, k, v, weights), {"scale": scale}, size(last, k, v))


def _packed(x: Tensor, fmt: Format) -> Packed:
    """By the reference, whose temporaries are large: one sequence, repeated."""
    one = quantize(x[:1], fmt)
    times = (x.shape[0], 1, 1)
    return Packed(one.codes.repeat(*times, 1), one.scales.repeat(*times, 1, 1), one.lead)


def _baselines(
    made: Callable[[], tuple[Tensor, Tensor, Tensor]], scale: float
) -> dict[str, Callable[[], Any]]:
    """Attention over everything in 16 bits, by others; made ready only when first called."""
    sdpa = torch.nn.functional.scaled_dot_product_attention
    qkv = cache(made)

    def attended() -> Tensor:
        q, k, v = qkv()
        return sdpa(q, k, v, is_causal=q.shape[2] > 1, scale=scale, enable_gqa=True)

    @cache
    def flash() -> Callable[[], Any]:
        from flash_attn import flash_attn_func

        turned = [x.transpose(1, 2).contiguous() for x in qkv()]
        return lambda: flash_attn_func(*turned, softmax_scale=scale, causal=turned[0].shape[1] > 1)

    return {"sdpa": attended, "flash-attn": lambda: flash()()}


def size(*tensors: Tensor) -> int:
    """Bytes of all of them."""
    return sum(x.nbytes for x in tensors)
