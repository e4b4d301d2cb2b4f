"""What the keys of a KV head have in common: measured once per model, read by quantisers.

A head's mean key is taken before keys are turned by their position, where it is the same in every
part of a text. What policies subtract is a fixed vector of turned keys: the mean of the turned
means over a stream of known length. Channels that turn slowly keep their part in it, those that
turn quickly have none. `studies/2026-11-key-offsets` compares it with turning the mean by each
slot's position.
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
from kvsearch.evaluation.head_losses import recall_texts
from kvsearch.evaluation.quality import Evaluator
from kvsearch.files import write_atomic
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
LARGE = 0.8  # share of a layer's energy from which on low bits collapse without an offset

Step = Callable[[str, float], AbstractContextManager[Any]]


@dataclass(frozen=True, eq=False)
class KeyMeans:
    """What keys have in common.

    Attributes:
        heads: KV heads of a layer.
        before: mean key of every head before it is turned, fp16 `[H, D]`, a word a layer.
        shares: of every layer, the share of its keys' energy that the mean of a head holds: of keys
            as attention gets them, and before they are turned; mean over heads.
        sample: of the model's weights, a word.
    """

    heads: int
    before: tuple[str, ...]
    shares: tuple[tuple[float, float], ...]
    sample: str

    @property
    def large(self) -> bool:
        """Whether low bits collapse without an offset."""
        return max(share for share, _ in self.shares) >= LARGE

    def offset(self, model: Any, tokens: int) -> Offset:
        """What policies for streams of so many tokens subtract from this model's keys."""
        words = []
        for each, inv_freq in zip(self.before, _angles(model, len(self.before)), strict=True):
            angle = torch.arange(tokens, dtype=torch.float64)[:, None] * inv_freq.double().cpu()
            mean = torch.tensor(numbers(each).astype(np.float64)).view(self.heads, -1)
            found = turned(mean, angle.cos().mean(0), angle.sin().mean(0)) if mean.numel() else mean
            words.append(word(found.numpy()))
        return Offset(keys=tuple(words), sample=self.sample)


class _Keys(PolicyLayer):
    """A layer of the full cache that notes the keys of one call."""

    def __init__(self, layer: Layer, config: Any) -> None:
        super().__init__(layer, config)
        self.k: Tensor | None = None

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: float | None
    ) -> Tensor:
        """Note the keys."""
        self.k = k[0].float().cpu()
        return super().attend(q, k, v, scale=scale, softcap=softcap)


@torch.no_grad()
def measure(evaluator: Evaluator) -> KeyMeans:
    """Read a text once."""
    loaded = evaluator.loaded
    config = text_config(loaded.model.config)
    layers = [_Keys(x, config) for x in empty_layers(Policy(), loaded.shape, packed=False)]
    ids = torch.from_numpy(recall_texts(loaded, TOKENS)[0].ids)[None].to(loaded.device)
    evaluator.head.hidden(ids, watched(loaded.model, layers))
    words, shares = [], []
    for layer, inv_freq in zip(layers, _angles(loaded.model, len(layers)), strict=True):
        if layer.k is None:  # without attention
            words.append("")
            shares.append((0.0, 0.0))
            continue
        (plain,) = Rotary(inv_freq.cpu()).undo(torch.arange(layer.k.shape[1]), layer.k)
        after, before = layer.k[:, FIRST:], plain[:, FIRST:]
        words.append(word(before.mean(1).numpy()))
        shares.append((_share(after), _share(before)))
    mine = sample(loaded.model)
    told = "" if mine is None else word(mine)
    return KeyMeans(loaded.shape.kv_heads, tuple(words), tuple(shares), told)


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
        "before": found.before, "shares": found.shares,
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
    return KeyMeans(loaded.shape.kv_heads, tuple(data["before"]), shares, str(data["sample"]))


def _kept(loaded: LoadedModel) -> Path:
    name = loaded.digest.rpartition(":")[2][:16]
    return cache_folder() / "keys" / f"{name}-{loaded.dtype}-{RECIPE.replace('/', '-')}.json"


def _angles(model: Any, layers: int) -> Sequence[Tensor]:
    """Angle per position of each pair of a layer's channels; none where they are not known."""
    try:
        return turning(model, "an offset", "")
    except ModelError:  # the mean of keys as they are serves as well as it can
        return [torch.zeros(0)] * layers


def _share(k: Tensor) -> float:
    """Of the energy of keys `[H, T, D]`, what their means hold; the mean over heads."""
    whole = k.double().square().sum(-1).mean(1).clamp_min(1e-30)
    return float((k.double().mean(1).square().sum(-1) / whole).mean())
