"""How much each layer suffers from eviction: the measurement behind `spread: sensitivity`.

A few neighbouring layers at a time keep only a small cache while all others keep everything; the
rise in NLL is theirs. Cheap (one short window per group), and measured once per model and text.
"""

import contextlib
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsearch.errors import RunError
from kvsearch.evaluate.quality import Evaluator
from kvsearch.files import write_atomic
from kvsearch.models.kept import cache_folder
from kvsearch.policy import Policy, Score, Spread

GROUPS = 10  # at least, where the model has as many layers
SHARE = 0.1  # of a search's tokens that more groups may cost
SLOTS = 64  # of the starved layers, headroom included
INTERVAL = 16


def groups_for(search_tokens: int, tokens: int, layers: int) -> int:
    """How finely to measure: single layers in a long search, coarser groups in a short one.

    On SmolLM2-135M, budgets from groups of three layers gained nothing on other text, budgets from
    single layers a third of the loss (`studies/2026-11-layer-budgets`).

    Args:
        search_tokens: tokens that the search will evaluate.
        tokens: tokens that measuring one group costs.
        layers: of the model.
    """
    affordable = int(SHARE * search_tokens / tokens) - 1  # and the full cache once
    return min(layers, max(GROUPS, affordable))


def measure(
    evaluator: Evaluator,
    windows: NDArray[np.int64],
    *,
    groups: int = GROUPS,
    progress: Callable[[int], None] | None = None,
) -> tuple[float, ...]:
    """Harm per layer, mean 1, never below a tenth of the mean.

    Args:
        evaluator: of the model.
        windows: token windows `[W, T]`, `T` well above `SLOTS`.
        groups: groups of neighbouring layers that are starved together.
        progress: called with the number of tokens done.
    """
    L, T = evaluator.loaded.shape.layers, windows.shape[1]
    full = evaluator.quality(Policy(), windows, resident=False, progress=progress).nll
    harm = np.zeros(L)
    for members in np.array_split(np.arange(L), min(groups, L)):
        slots = np.full(L, float(T + INTERVAL))
        slots[members] = SLOTS
        starved = Policy(
            slots=round(slots.mean()),
            interval=INTERVAL,
            recents=SLOTS // 2,
            score=Score(),
            spread=Spread(kind="sensitivity", exponent=1.0, weights=tuple(slots.tolist())),
        )
        nll = evaluator.quality(starved, windows, resident=False, progress=progress).nll
        harm[members] = float((nll - full)[:, SLOTS:].mean()) / len(members)
    harm = np.maximum(harm, 0.1 * max(harm.mean(), 1e-6))
    harm /= harm.mean()
    return tuple(float(f"{h:.4g}") for h in harm)


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
        groups: groups of neighbouring layers, see `groups_for`.
    """
    loaded = evaluator.loaded
    groups = min(groups, loaded.shape.layers)
    words = f"{loaded.digest}/{loaded.dtype}/{groups}/{SLOTS}/{INTERVAL}/{windows.shape}"
    key = sha256(words.encode() + np.ascontiguousarray(windows).tobytes()).hexdigest()[:16]
    file = cache_folder() / "sensitivity" / f"{key}.json"
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        if len(kept) == loaded.shape.layers:
            return tuple(float(h) for h in kept)
    except (OSError, ValueError, TypeError):
        pass  # not measured yet
    with step("layer sensitivity", groups + 1) as shown:
        found = measure(evaluator, windows, groups=groups, progress=lambda _: shown.advance())
    with contextlib.suppress(RunError):  # a cache that cannot be written only costs time
        write_atomic(file, json.dumps(found) + "\n")
    return found
