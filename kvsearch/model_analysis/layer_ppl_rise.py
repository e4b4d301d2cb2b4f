"""What a layer's attention is worth: the rise in perplexity without it (KVPruner's dPPL).

The layer's MLP and residual stay. A pass starts at the layer that it changes, from what the layer
was given in the full pass, so measuring all layers costs about half a pass for each.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsearch.evaluation.evaluator import Evaluator
from kvsearch.models.disk_cache import remembered
from kvsearch.models.shape import policy_layers
from kvsearch.policy import Channels, Policy
from kvsearch.policy.channels import ALL, NONE


def measure(
    evaluator: Evaluator,
    windows: NDArray[np.int64],
    progress: Callable[[], None] | None = None,
) -> list[float]:
    """Perplexity without the attention of each layer, minus that of the whole model.

    Args:
        evaluator: of the model.
        windows: token windows `[W, T]`; all their tokens count.
        progress: called after every layer of every window.
    """
    blocks = policy_layers(evaluator.loaded.model.config)
    whole, without = [], []
    for window in windows:
        given = evaluator.divergence(window[None])
        whole.append(given.nll())
        rows = []
        for layer, block in enumerate(blocks):
            rows.append(given.nll(_removing(layer, len(blocks)), same=block))
            if progress is not None:
                progress()
        without.append(np.stack(rows))
    base = np.exp(np.mean(whole, dtype=np.float64))
    lost = np.exp(np.mean(without, axis=(0, 2, 3), dtype=np.float64)) - base
    return [float(f"{x:.6g}") for x in lost]


def _removing(layer: int, layers: int) -> Policy:
    words = tuple(NONE if i == layer else ALL for i in range(layers))
    return Policy(channels=Channels(qk=words, vo=words))


def kept_or_measured(
    evaluator: Evaluator,
    windows: NDArray[np.int64],
    step: Callable[[str, float], AbstractContextManager[Any]],
) -> tuple[float, ...]:
    """`measure`, once per model, dtype and text.

    Args:
        evaluator: of the model.
        windows: token windows `[W, T]`.
        step: opens progress of a title and a total.
    """
    loaded = evaluator.loaded

    def make() -> list[float]:
        with step("perplexity without each layer", loaded.shape.layers * len(windows)) as shown:
            return measure(evaluator, windows, shown.advance)

    def read(data: list[float]) -> tuple[float, ...]:
        if len(data) != loaded.shape.layers:
            raise ValueError
        return tuple(float(x) for x in data)

    words = f"dppl/{loaded.digest}/{loaded.dtype}/{windows.shape}"
    ids = np.ascontiguousarray(windows).tobytes()
    return remembered("ppl_rise", words, ids, read, make)
