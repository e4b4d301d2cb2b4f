"""What the keys of a KV head have in common: measured once per model, read by quantisers.

A head's mean key is taken before keys are turned by their position, where it is the same in every
part of a text. What policies subtract is a fixed vector of turned keys: the mean of the turned
means over a stream of known length. Channels that turn slowly keep their part in it, those that
turn quickly have none; where that part is large, scales make up for it. They divide a rotary pair
of keys by the root of what is left of its size over that of the queries there, so that an error
that a rotated format spreads over all channels matters alike in all (SmoothQuant,
arXiv:2211.10438, for keys). `studies/2026-11-key-offsets` compares both with turning the mean by
each slot's position.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvsearch.cache.huggingface import PolicyLayer, turning, watched
from kvsearch.cache.layer import Layer, empty_layers
from kvsearch.cache.model.rotary import Rotary
from kvsearch.errors import ModelError, RunError
from kvsearch.evaluation.evaluator import Evaluator
from kvsearch.files import write_atomic
from kvsearch.model_analysis.head_losses import recall_texts
from kvsearch.models.disk_cache import cache_folder
from kvsearch.models.load import LoadedModel
from kvsearch.models.sample import sample
from kvsearch.models.shape import text_config
from kvsearch.policy import Offset, Policy
from kvsearch.policy.key_offset import numbers, word
from kvsearch_kernels.rotary import turned

SCHEMA = "kvsearch.keys/1"
RECIPE = "means/1"  # the text and how it is measured; a change of either makes another recipe
TOKENS = 512  # of the first text of `recall/`
FIRST = 4  # first tokens, whose keys are like no others
LEAST = 1e-4  # of the mean energy: what a pair of channels has at least
MOST = 4.0  # natural logarithm of a scale
LARGE = 0.8  # share of a layer's energy from which on low bits collapse without an offset

Step = Callable[[str, float], AbstractContextManager[Any]]


@dataclass(frozen=True, eq=False)
class KeyMeans:
    """What keys have in common.

    Attributes:
        heads: KV heads of a layer.
        before: mean key of every head before it is turned, fp16 `[H, D]`, a word a layer.
        spreads, query_sizes: likewise, root mean square of keys less that mean, and of the queries
            of a head's group, in the rotary pair of each channel.
        shares: of every layer, the share of its keys' energy that the mean of a head holds: of keys
            as attention gets them, and before they are turned; mean over heads.
        sample: of the model's weights, a word.
    """

    heads: int
    before: tuple[str, ...]
    spreads: tuple[str, ...]
    query_sizes: tuple[str, ...]
    shares: tuple[tuple[float, float], ...]
    sample: str

    @property
    def large(self) -> bool:
        """Whether low bits collapse without an offset."""
        return max(share for share, _ in self.shares) >= LARGE

    def offset(self, model: Any, tokens: int) -> Offset:
        """What policies for streams of so many tokens do to this model's keys, with scales."""
        keys, scales = [], []
        angles = _angles(model, len(self.before))
        each = zip(self.before, self.spreads, self.query_sizes, angles, strict=True)
        for *words, inv_freq in each:
            mean, spread, q = (torch.tensor(numbers(w).astype(np.float64)) for w in words)
            if not mean.numel():  # a layer without attention
                keys.append("")
                scales.append("")
                continue
            mean, spread, q = (x.view(self.heads, -1) for x in (mean, spread, q))
            angle = torch.arange(tokens, dtype=torch.float64)[:, None] * inv_freq.double().cpu()
            found = turned(mean, angle.cos().mean(0), angle.sin().mean(0))
            turning_away = _in_pairs(mean.square() - found.square(), inv_freq)
            left = _floored(spread.square() + turning_away.clamp_min(0))
            ratio = (left / _floored(q.square())).log() / 4
            scale = (ratio - ratio.mean(-1, keepdim=True)).clamp(-MOST, MOST).exp()
            keys.append(word(found.numpy()))
            scales.append(word(scale.numpy()))
        return Offset(keys=tuple(keys), scales=tuple(scales), sample=self.sample)


class _Keys(PolicyLayer):
    """A layer of the full cache that notes queries and keys of one call."""

    def __init__(self, layer: Layer, config: Any) -> None:
        super().__init__(layer, config)
        self.q: Tensor | None = None
        self.k: Tensor | None = None

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: float | None
    ) -> Tensor:
        """Note them."""
        self.q, self.k = q[0].float().cpu(), k[0].float().cpu()
        return super().attend(q, k, v, scale=scale, softcap=softcap)


@torch.no_grad()
def measure(evaluator: Evaluator) -> KeyMeans:
    """Read a text once."""
    loaded = evaluator.loaded
    config = text_config(loaded.model.config)
    layers = [_Keys(x, config) for x in empty_layers(Policy(), loaded.shape, packed=False)]
    ids = torch.from_numpy(recall_texts(loaded, TOKENS)[0].ids)[None].to(loaded.device)
    evaluator.head.hidden(ids, watched(loaded.model, layers))
    words, shares = list[tuple[str, str, str]](), []
    for layer, inv_freq in zip(layers, _angles(loaded.model, len(layers)), strict=True):
        if layer.k is None or layer.q is None:  # without attention
            words.append(("", "", ""))
            shares.append((0.0, 0.0))
            continue
        (plain,) = Rotary(inv_freq.cpu()).undo(torch.arange(layer.k.shape[1]), layer.k)
        after, before = layer.k[:, FIRST:], plain[:, FIRST:]
        queries = layer.q[:, FIRST:].unflatten(0, (len(after), -1)).flatten(1, 2)
        mean = before.mean(1, keepdim=True)
        spread, size = (_size(x, inv_freq) for x in (before - mean, queries))
        words.append((word(mean.numpy()), word(spread.numpy()), word(size.numpy())))
        shares.append((_share(after), _share(before)))
    mine = sample(loaded.model)
    told = "" if mine is None else word(mine)
    means, spreads, asking = zip(*words, strict=True)
    return KeyMeans(loaded.shape.kv_heads, means, spreads, asking, tuple(shares), told)


def of_model(evaluator: Evaluator, step: Step, *, anew: bool = False) -> tuple[KeyMeans, str]:
    """What the keys of a model have in common: kept on disk, or measured now and kept.

    Args:
        evaluator: of the model.
        step: opens progress of a title and a total.
        anew: measure, whatever is kept.

    Returns:
        The means, and where they are from, in words.
    """
    loaded = evaluator.loaded
    kept = _kept(loaded)
    if not anew:
        with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
            return _read(json.loads(kept.read_text("utf-8")), loaded), "kept on disk"
    with step("means of the keys", 1) as shown:
        found = measure(evaluator)
        shown.advance()
    data = {
        "schema": SCHEMA, "recipe": RECIPE, "digest": loaded.digest, "sample": found.sample,
        "before": found.before, "spreads": found.spreads, "query_sizes": found.query_sizes,
        "shares": found.shares,
    }  # fmt: skip
    with suppress(RunError):  # a cache that cannot be written only costs time
        write_atomic(kept, json.dumps(data) + "\n")
    return found, "measured now"


def _read(data: Any, loaded: LoadedModel) -> KeyMeans:
    """What `of_model` has kept.

    Raises:
        ValueError: it is of other weights.
    """
    mine = sample(loaded.model)
    if (data["schema"], data["recipe"], data["digest"]) != (SCHEMA, RECIPE, loaded.digest) or data[
        "sample"
    ] != ("" if mine is None else word(mine)):
        raise ValueError("of other weights")
    shares = tuple((float(a), float(b)) for a, b in data["shares"])
    before, spreads, sizes = (
        tuple(map(str, data[name])) for name in ("before", "spreads", "query_sizes")
    )
    heads = loaded.shape.kv_heads
    return KeyMeans(heads, before, spreads, sizes, shares, str(data["sample"]))


def _kept(loaded: LoadedModel) -> Path:
    name = loaded.digest.rpartition(":")[2][:16]
    return cache_folder() / "keys" / f"{name}-{loaded.dtype}-{RECIPE.replace('/', '-')}.json"


def _angles(model: Any, layers: int) -> Sequence[Tensor]:
    """Angle per position of each pair of a layer's channels; none where they are not known."""
    try:
        return turning(model, "an offset", "")
    except ModelError:  # the mean of keys as they are serves as well as it can
        return [torch.zeros(0)] * layers


def _size(x: Tensor, inv_freq: Tensor) -> Tensor:
    """Root mean square of `x` `[H, T, D]` in the rotary pair of each channel, `[H, D]`."""
    return _in_pairs(x.double().square().mean(1), inv_freq).sqrt()


def _floored(energy: Tensor) -> Tensor:
    """Energies `[H, D]` that are above 0 in every channel of a head."""
    return energy + LEAST * energy.mean(-1, keepdim=True).clamp_min(1e-30)


def _in_pairs(x: Tensor, inv_freq: Tensor) -> Tensor:
    """Means of `x` `[H, D]` over the channels of each rotary pair, for either of them."""
    half = inv_freq.shape[-1]
    mean = (x[:, :half] + x[:, half : 2 * half]) / 2
    return torch.cat([mean, mean, x[:, 2 * half :]], -1)


def _share(k: Tensor) -> float:
    """Of the energy of keys `[H, T, D]`, what their means hold; the mean over heads."""
    whole = k.double().square().sum(-1).mean(1).clamp_min(1e-30)
    return float((k.double().mean(1).square().sum(-1) / whole).mean())
