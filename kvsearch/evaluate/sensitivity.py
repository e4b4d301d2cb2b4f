"""How much each layer, or KV head, suffers from eviction: what budgets by sensitivity follow.

A few neighbouring layers, or one head, keep only a small cache while all others keep everything.
Their sensitivity is the KL divergence from the full cache's next-token distributions: it says as
much as the rise in NLL, without the luck of which token came next. Measured once per model and
text.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsearch.evaluate.kept import kept_or_made
from kvsearch.evaluate.quality import Evaluator
from kvsearch.models.shape import policy_layers
from kvsearch.policy import Budgets, ModelShape, Policy
from kvsearch.rules import Attention

LONG, SHORT = 2048, 512  # tokens of a window: where the search can pay for them, and at least
GROUPS = 10  # at least, where the model has as many layers
WINDOWS = 4  # at most
SHARE = 0.1  # of a search's tokens that this may cost, unless the least is more
KEPT = 3 / 32  # of a window: slots of the starved layers, headroom included
INTERVAL = 16
LEAST = 0.03  # of the mean: what any layer is taken to lose


@dataclass(frozen=True)
class Plan:
    """How finely to measure, and on how much text.

    Attributes:
        groups: groups of neighbouring layers that are starved together.
        windows: how many.
        tokens: of each.
    """

    groups: int
    windows: int
    tokens: int


def plan(search_tokens: int, layers: int, context: int) -> Plan:
    """What a share of the search pays for: single layers first, then longer windows, then more.

    On SmolLM2-135M, budgets from groups of three layers regained a quarter of the loss on other
    text, budgets from single layers a third and more (`studies/2026-11-layer-budgets`).

    Args:
        search_tokens: tokens that the search will evaluate.
        layers: of the model.
        context: tokens of its windows.
    """
    affordable = SHARE * search_tokens
    short, long = min(SHORT, context), min(LONG, context)
    groups = min(layers, max(GROUPS, int(2 * (affordable / short - 1))))
    tokens = min(long, max(short, int(affordable / _passes(groups))))
    windows = int(affordable / _passes(groups) / tokens)
    return Plan(groups, max(1, min(WINDOWS, windows)), tokens)


def _passes(groups: int) -> float:
    """Forward passes that one window costs: a group starts at its layer, so half of one each."""
    return 1 + groups / 2


def measure(
    evaluator: Evaluator,
    windows: NDArray[np.int64],
    *,
    groups: int = GROUPS,
    progress: Callable[[], None] | None = None,
) -> tuple[float, ...]:
    """Sensitivity per layer, mean 1, each at least about `LEAST`.

    Args:
        evaluator: of the model.
        windows: token windows `[W, T]`; starved layers keep `KEPT` of each.
        groups: groups of neighbouring layers that are starved together.
        progress: called after every group of every window.
    """
    L = evaluator.loaded.shape.layers
    groups_of = np.array_split(np.arange(L), min(groups, L))
    parts = [Part(tuple(int(i) for i in members)) for members in groups_of]
    lost = divergences(evaluator, windows, parts, progress)
    found = [x / len(part.layers) for part, x in zip(parts, lost, strict=True) for _ in part.layers]
    return tuple(_scaled(np.array(found)))


def measure_heads(
    evaluator: Evaluator,
    windows: NDArray[np.int64],
    *,
    progress: Callable[[], None] | None = None,
) -> tuple[tuple[float, ...], ...]:
    """Sensitivity per KV head of every layer, mean 1, each at least about `LEAST`.

    Arguments are as in `measure`; `progress` is called after every head of every window.
    """
    shape = evaluator.loaded.shape
    parts = [Part((i,), h) for i in range(shape.layers) for h in range(shape.kv_heads)]
    found = _scaled(np.array(divergences(evaluator, windows, parts, progress)))
    rows = np.array(found).reshape(shape.layers, shape.kv_heads)
    return tuple(tuple(float(x) for x in row) for row in rows)


def _scaled(lost: NDArray[np.float64]) -> list[float]:
    lost = np.maximum(lost, LEAST * max(lost.mean(), 1e-9))
    return [float(f"{x:.4g}") for x in lost / lost.mean()]


@dataclass(frozen=True)
class Part:
    """What is starved together: all heads of neighbouring `layers`, or one `head` of one layer."""

    layers: tuple[int, ...]
    head: int | None = None


def divergences(
    evaluator: Evaluator,
    windows: NDArray[np.int64],
    parts: Sequence[Part],
    progress: Callable[[], None] | None = None,
) -> list[float]:
    """Mean KL divergence from the full cache, nats per token, with one part after another starved.

    A pass starts at the starved layer: those before it repeat what they returned.
    """
    blocks = policy_layers(evaluator.loaded.model.config)
    shape, T = evaluator.loaded.shape, windows.shape[1]
    slots, found = max(2 * INTERVAL, int(KEPT * T)), [0.0] * len(parts)
    for window in windows:
        divergence = evaluator.divergence(window[None])
        for i, part in enumerate(parts):
            policy = starving(part, shape, slots, T)
            lost = divergence.of(policy, same=blocks[part.layers[0]])
            found[i] += float(lost[:, slots:].mean()) / len(windows)
            if progress is not None:
                progress()
    return found


def starving(part: Part, shape: ModelShape, slots: int, tokens: int) -> Policy:
    """Keeps `slots` in the heads of `part` and all `tokens` in the others."""
    weights = np.full((shape.layers, shape.kv_heads), float(tokens + INTERVAL))
    weights[list(part.layers), part.head if part.head is not None else slice(None)] = slots
    rows: Any = weights[:, 0].tolist() if part.head is None else map(tuple, weights.tolist())
    return Policy(
        slots=round(weights.mean()),
        interval=INTERVAL,
        recent_window=slots // 2,
        rule=Attention(),
        budgets=Budgets(kind="sensitivity", exponent=1.0, weights=tuple(rows)),
    )


def kept_or_measured(
    evaluator: Evaluator,
    windows: NDArray[np.int64],
    step: Callable[[str, float], AbstractContextManager[Any]],
    groups: int = GROUPS,
) -> tuple[float, ...]:
    """`measure`, once per model, dtype and text: the answer is kept in the user's cache folder.

    Args:
        evaluator: of the model.
        windows: token windows `[W, T]`.
        step: opens progress of a title and a total.
        groups: groups of neighbouring layers, see `plan`.
    """
    loaded = evaluator.loaded

    def make() -> tuple[float, ...]:
        with step("layer sensitivity", groups * len(windows)) as shown:
            return measure(evaluator, windows, groups=groups, progress=shown.advance)

    words = f"kl/{loaded.digest}/{loaded.dtype}/{groups}/{KEPT}/{INTERVAL}/{LEAST}/{windows.shape}"
    found = kept_or_made("sensitivity", words, windows, loaded.shape.layers, make)
    return tuple(float(h) for h in found)
