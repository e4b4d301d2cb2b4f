"""Estimated loss of every KV head at several sizes and precisions, from gradients.

A smaller cache changes a head's output. To second order, the KL divergence of the next-token
distribution is then half the squared change, weighted by the Fisher information, which is estimated
from gradients of the log-probability of tokens drawn from the model. One forward and a few backward
passes price all heads. The gradient carries the change through later layers to first order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvsearch.cache.huggingface import Watching, watched
from kvsearch.evaluation.evaluator import Evaluator
from kvsearch.models.head import ROWS, Head
from kvsearch.models.shape import policy_layers
from kvsearch.policy import Quantizer
from kvsearch.policy.schedule import NEVER
from kvsearch_kernels.lifetime_attention import lifetime_attention
from kvsearch_kernels.lifetime_attention.reference import reference
from kvsearch_kernels.quantize_kv import Format, fake_quantize

DRAWS = 2
SINKS = 4  # first tokens that every size keeps
BITS = (8, 4, 3, 2)


@dataclass(frozen=True, eq=False)
class Prices:
    """Estimated loss in nats per token when one head alone changes.

    Attributes:
        sizes: slots kept: `SINKS` first tokens and the newest.
        slots: loss by size `[L, H, len(sizes)]`.
        bits: bits of keys, or of values.
        keys, values: loss by bits `[L, H, len(bits)]`, in the quantiser given.
    """

    sizes: tuple[int, ...]
    slots: NDArray[np.float64]
    bits: tuple[int, ...]
    keys: NDArray[np.float64]
    values: NDArray[np.float64]


def price(
    evaluator: Evaluator,
    window: NDArray[np.int64],
    *,
    sizes: Sequence[int],
    quantizer: Quantizer,
    first: int = 0,
    bits: Sequence[int] = BITS,
    draws: int = DRAWS,
    seed: int = 0,
    progress: Callable[[], None] | None = None,
) -> Prices:
    """Price all heads on one token window `[T]`.

    Args:
        evaluator: of the model.
        window: token ids.
        sizes: slots to price, each above `SINKS` and below `T`.
        quantizer: how keys and values would be stored.
        first: first position at which a changed output counts.
        bits: to price.
        draws: tokens drawn at every position, each a backward pass.
        seed: of the drawn tokens.
        progress: called after every layer.
    """
    given = torch.from_numpy(window)[None].to(evaluator.loaded.device)
    found = []
    for layer in _noted(evaluator, given, draws, seed):
        with torch.no_grad():
            lost = torch.cat(_layer(layer, first, sizes, bits, quantizer), -1)
        found.append(lost.cpu().double().numpy())
        if progress is not None:
            progress()
    ends = len(sizes), len(sizes) + len(bits)
    slots, keys, values = np.split(np.stack(found), ends, axis=-1)
    return Prices(tuple(sizes), slots, tuple(bits), keys, values)


class _Noted(Watching):
    """A layer that attends to everything, and stores its inputs and gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.gradients: list[Tensor] = []

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: float | None
    ) -> Tensor:
        """Causal attention whose output keeps its gradient."""
        self.q, self.k, self.v = q.detach(), k.detach(), v.detach()
        self.options: dict[str, Any] = dict(scale=scale, softcap=softcap)
        if softcap is None:  # fused: stores no attention map for the backward pass
            key, value = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
            out = scaled_dot_product_attention(q, key, value, is_causal=True, scale=scale)
        else:
            out, _ = reference(q, k, v, *_lives(k, None), first_query=0, **self.options)
        self.out = out if out.requires_grad else out.requires_grad_()
        self.out.retain_grad()
        return self.out

    def take(self) -> None:
        """Keep the gradient of one backward pass."""
        assert self.out.grad is not None
        self.gradients.append(self.out.grad)
        self.out.grad = None

    def loss(self, out: Tensor, first: int) -> Tensor:
        """Estimated loss `[H]` of returning `out` `[1, Hq, M, D]` from row `first` on."""
        rows = slice(first, first + out.shape[2])
        change = out - self.out[:, :, rows]
        groups = (self.k.shape[1], -1)
        lost = torch.zeros(self.k.shape[1], dtype=torch.float32, device=out.device)
        for gradient in self.gradients:
            felt = (change * gradient[:, :, rows]).sum(-1)[0].unflatten(0, groups).sum(1)
            lost += felt.square().mean(-1) / 2 / len(self.gradients)
        return lost


def _noted(evaluator: Evaluator, ids: Tensor, draws: int, seed: int) -> list[_Noted]:
    """Every policy layer after one forward pass and some backward passes over `ids` `[1, T]`."""
    model, head = evaluator.loaded.model, evaluator.head
    layers = [_Noted() for _ in policy_layers(model.config)]
    draw = torch.Generator(ids.device).manual_seed(seed)
    with torch.enable_grad():
        hidden = head.hidden(ids, watched(model, layers))
        for _ in range(draws):
            hidden.backward(_score(head, hidden, draw), retain_graph=True)
            for layer in layers:
                layer.take()
    for layer in layers:
        layer.out = layer.out.detach()  # frees what the backward passes needed
    return layers


def _score(head: Head, hidden: Tensor, draw: torch.Generator) -> Tensor:
    """Gradient, by the last hidden states `[1, T, hidden]`, of what drawn next tokens score."""
    found = []
    for part in hidden.detach().split(ROWS, 1):
        part.requires_grad_()
        log = head.logits(part).log_softmax(-1)[0]
        drawn = torch.multinomial(log.detach().exp(), 1, generator=draw)
        found.append(torch.autograd.grad(log.gather(1, drawn).sum(), part)[0])
    return torch.cat(found, 1)


def _lives(k: Tensor, size: int | None) -> tuple[Tensor, Tensor]:
    """Births and deaths of all keys, in an endless cache or in a window of `size` slots."""
    birth = torch.arange(k.shape[2], device=k.device)
    if size is None:
        return birth, torch.full_like(birth, NEVER)
    death = birth + size - SINKS
    return birth, torch.where(birth < SINKS, torch.full_like(birth, NEVER), death)


def _sized(layer: _Noted, size: int, first: int) -> Tensor:
    """Output from row `first` on in windows of `size` slots, the first of them sinks."""
    parts = []
    for start in range(first, layer.q.shape[2], ROWS):
        rows = slice(start, start + ROWS)
        low = max(SINKS, start - size)
        birth, death = _lives(layer.k, size)
        some = torch.cat([birth[:SINKS], birth[low : rows.stop]])
        out, _ = lifetime_attention(
            layer.q[:, :, rows], layer.k[:, :, some], layer.v[:, :, some], birth[some],
            death[some], first_query=start, **layer.options,
        )  # fmt: skip
        parts.append(out)
    return torch.cat(parts, 2)


def _layer(
    layer: _Noted, first: int, sizes: Sequence[int], bits: Sequence[int], quantizer: Quantizer
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses of one layer: by size, by bits of keys, by bits of values, each `[H, ...]`."""
    slots = [layer.loss(_sized(layer, size, first), first) for size in sizes]
    D, lives = layer.k.shape[3], _lives(layer.k, None)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for b in bits:
        fmt = Format(b, quantizer.group or D, quantizer.levels, quantizer.rotate)
        low = (fake_quantize(x, fmt).to(x.dtype) for x in (layer.k, layer.v))
        for losses, k, v in zip((keys, values), *_either(layer, *low), strict=True):
            out, _ = lifetime_attention(
                layer.q[:, :, first:], k, v, *lives, first_query=first, **layer.options
            )
            losses.append(layer.loss(out, first))
    return torch.stack(slots, -1), torch.stack(keys, -1), torch.stack(values, -1)


def _either(
    layer: _Noted, k: Tensor, v: Tensor
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Keys and values with the keys rounded, and with the values rounded."""
    return (k, layer.k), (layer.v, v)
