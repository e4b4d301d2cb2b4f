"""Layer sensitivity: how much eviction in a layer costs, for `budgets: sensitivity`.

A few neighbouring layers at a time have a small cache (they are starved) while all others keep
everything. Their sensitivity is the KL divergence from the full cache's next-token distributions.
Its mean is about the rise in NLL, without the noise of which token came next. Measured once per
model and text.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsearch.evaluate.probes import Ask, Lost, Probe, here
from kvsearch.evaluate.quality import Evaluator
from kvsearch.models.disk_cache import remembered
from kvsearch.models.shape import policy_layers
from kvsearch.policy import Budgets, Policy
from kvsearch.rules import Attention

LONG, SHORT = 2048, 512  # tokens of a window: where the search can pay for them, and at least
GROUPS = 10  # at least, where the model has as many layers
WINDOWS = 4  # at most
SHARE = 0.1  # of a search's tokens that this may cost, or the smallest plan if that is more
KEPT = 3 / 32  # of a window: slots of the starved layers, headroom included
INTERVAL = 16
LEAST = 0.03  # smallest sensitivity of a layer, in units of the mean


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
    """The plan that a share of the search pays for: single layers, then longer, then more windows.

    On SmolLM2-135M, budgets from groups of three layers removed a quarter of the loss on other
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
    progress: Callable[[], None] = lambda: None,
    ask: Ask | None = None,
) -> tuple[float, ...]:
    """Sensitivity per layer, mean 1, each at least about `LEAST`.

    Args:
        evaluator: of the model.
        windows: token windows `[W, T]`; starved layers keep `KEPT` of each.
        groups: groups of neighbouring layers that are starved together.
        progress: called after every group of every window.
        ask: what answers probes of the windows; this process if None.
    """
    L = evaluator.loaded.shape.layers
    parts = [members.tolist() for members in np.array_split(np.arange(L), min(groups, L))]
    lost = divergences(evaluator, windows, parts, progress, ask)
    each = np.array([x / len(part) for part, x in zip(parts, lost, strict=True) for _ in part])
    each = np.maximum(each, LEAST * max(each.mean(), 1e-9))
    return tuple(float(f"{x:.4g}") for x in each / each.mean())


def divergences(
    evaluator: Evaluator,
    windows: NDArray[np.int64],
    parts: Sequence[Sequence[int]],
    progress: Callable[[], None] = lambda: None,
    ask: Ask | None = None,
) -> list[float]:
    """Mean KL divergence from the full cache, nats per token, with some layers starved at a time.

    A pass starts at the first starved layer: those before it repeat what they returned.
    """
    blocks = policy_layers(evaluator.loaded.model.config)
    L, T = evaluator.loaded.shape.layers, windows.shape[1]
    slots = max(2 * INTERVAL, int(KEPT * T))
    asked = [
        Lost(starving(members, L, slots, T), same=blocks[members[0]], first=slots)
        for members in parts
    ]
    probes = [Probe(w, T, question) for w in range(len(windows)) for question in asked]
    lost = (ask or here(evaluator, windows))(probes, progress)
    found = [0.0] * len(parts)
    for i, x in enumerate(lost):
        found[i % len(parts)] += float(x) / len(windows)
    return found


def starving(members: Sequence[int], layers: int, slots: int, tokens: int) -> Policy:
    """Keeps `slots` in the layers `members` and all `tokens` in the others."""
    weights = np.full(layers, float(tokens + INTERVAL))
    weights[list(members)] = slots
    return Policy(
        slots=round(weights.mean()),
        interval=INTERVAL,
        recent_window=slots // 2,
        rule=Attention(),
        budgets=Budgets(kind="sensitivity", exponent=1.0, weights=tuple(weights.tolist())),
    )


def kept_or_measured(
    evaluator: Evaluator,
    windows: NDArray[np.int64],
    step: Callable[[str, float], AbstractContextManager[Any]],
    groups: int = GROUPS,
    ask: Ask | None = None,
) -> tuple[float, ...]:
    """`measure`, once per model, dtype and text: the user's cache folder keeps the result.

    Args:
        evaluator: of the model.
        windows: token windows `[W, T]`.
        step: opens progress of a title and a total.
        groups: groups of neighbouring layers, see `plan`.
        ask: as in `measure`.
    """
    loaded, L = evaluator.loaded, evaluator.loaded.shape.layers
    words = f"kl/{loaded.digest}/{loaded.dtype}/{groups}/{KEPT}/{INTERVAL}/{LEAST}/{windows.shape}"

    def make() -> tuple[float, ...]:
        with step("layer sensitivity", groups * len(windows)) as shown:
            return measure(evaluator, windows, groups=groups, progress=shown.advance, ask=ask)

    def read(data: Any) -> tuple[float, ...]:
        found = tuple(float(h) for h in data)
        if len(found) != L:
            raise ValueError(f"{len(found)} layers")
        return found

    ids = np.ascontiguousarray(windows).tobytes()
    return remembered("sensitivity", words, ids, read, make)
