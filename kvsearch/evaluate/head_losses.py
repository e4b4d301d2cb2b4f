"""Measuring every KV head for budgets and bits per head, within a share of a search's tokens.

One forward and a few backward passes estimate the loss of every head at several sizes (`prices`).
The rest of the share goes into direct passes with one head starved (given a small cache), the heads
with the largest estimates first. The curve of a measured head is scaled to its measurement, the
curves of the others by the median ratio of measurement to estimate.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsearch.evaluate.prices import BITS, DRAWS, SINKS, estimates, prices
from kvsearch.evaluate.probes import Ask, Lost, Probe, here
from kvsearch.evaluate.quality import Evaluator
from kvsearch.models.disk_cache import remembered
from kvsearch.models.shape import policy_layers
from kvsearch.policy import Budgets, HeadLosses, ModelShape, Policy, Quantizer

LONG, SHORT = 2048, 512  # tokens of the window: where the search can pay for them, and at least
PRICE = 6.0  # forward passes that estimating costs
SHARE = 0.1  # of a search's tokens that this may cost, or the smallest plan if that is more
STARVED = 1 / 30  # of the window: slots of a starved head
SIZES = (1 / 100, 1 / 60, STARVED, 1 / 16, 1 / 8, 1 / 4, 1 / 2)  # of the window


@dataclass(frozen=True)
class Plan:
    """How much to measure: a window of so many `tokens`, and so many `direct` passes."""

    tokens: int
    direct: int


def plan(search_tokens: int, shape: ModelShape, context: int) -> Plan:
    """What a share of the search pays for: estimates first, on a longer window, then passes.

    Args:
        search_tokens: tokens that the search will evaluate.
        shape: of the model.
        context: tokens of its windows.
    """
    affordable = SHARE * search_tokens
    tokens = int(min(LONG, context, max(SHORT, affordable / 2 / PRICE)))
    direct = int((affordable / tokens - PRICE) / 0.5)  # half a pass: it starts at its layer
    return Plan(tokens, max(0, min(direct, shape.layers * shape.kv_heads)))


def measure(
    evaluator: Evaluator,
    window: NDArray[np.int64],
    direct: int,
    progress: Callable[[], None] = lambda: None,
    ask: Ask | None = None,
) -> HeadLosses:
    """Losses of every head on one token window `[T]`.

    Args:
        evaluator: of the model.
        window: token ids.
        direct: heads whose loss is measured; that of the others is estimated.
        progress: called after every layer that is estimated and every head that is measured.
        ask: what answers probes of the window; this process if None.
    """
    ask = ask or here(evaluator, window[None])
    shape, T = evaluator.loaded.shape, len(window)
    sizes = sorted({max(SINKS + 4, int(share * T)) for share in SIZES})
    starved = max(SINKS + 4, int(STARVED * T))
    asked = estimates(shape.layers, sizes, Quantizer(group=None, rotate=True))
    found = prices(asked, ask([Probe(0, T, question) for question in asked], progress))
    curves = found.slots.reshape(-1, len(sizes))
    at = curves[:, sizes.index(starved)]
    order = np.argsort(-at, kind="stable")[:direct]
    blocks = policy_layers(evaluator.loaded.model.config)
    starve = [
        Lost(starving(head, shape, starved, T), blocks[head // shape.kv_heads], starved)
        for head in order.tolist()
    ]
    lost = np.array(ask([Probe(0, T, question) for question in starve], progress))
    ratios = lost / np.maximum(at[order], 1e-12)
    scale = np.full(len(curves), float(np.median(ratios)) if direct else 1.0)
    scale[order] = ratios
    return HeadLosses(
        heads=shape.kv_heads,
        sizes=tuple(sizes),
        slots=_rows(curves * scale[:, None]),
        bits=found.bits,
        keys=_rows(found.keys.reshape(len(curves), -1)),
        values=_rows(found.values.reshape(len(curves), -1)),
        starved=starved,
        measured=direct,
    )


def kept_or_measured(
    evaluator: Evaluator,
    window: NDArray[np.int64],
    direct: int,
    step: Callable[[str, float], AbstractContextManager[Any]],
    ask: Ask | None = None,
) -> HeadLosses:
    """`measure`, once per model, dtype, text and plan: the user's cache folder keeps the result.

    Args:
        evaluator: of the model.
        window: token ids `[T]`.
        direct: heads that are measured, see `Plan`.
        step: opens progress of a title and a total.
        ask: as in `measure`.
    """
    loaded, shape = evaluator.loaded, evaluator.loaded.shape
    words = f"heads/{loaded.digest}/{loaded.dtype}/{direct}/{STARVED}/{SIZES}/{BITS}/{DRAWS}"

    def make() -> dict[str, Any]:
        with step("head sensitivity", shape.layers + direct) as shown:
            return measure(evaluator, window, direct, shown.advance, ask).plain()

    def read(data: Any) -> HeadLosses:
        found = HeadLosses.read(data)
        if len(found.slots) != shape.layers * shape.kv_heads:
            raise ValueError("another model's heads")
        return found

    return remembered("heads", words, np.ascontiguousarray(window).tobytes(), read, make)


def starving(head: int, shape: ModelShape, slots: int, tokens: int) -> Policy:
    """Keeps sinks and the newest, `slots` in all, in one head, counted layer by layer."""
    weights = np.full(shape.layers * shape.kv_heads, float(tokens + 1))
    weights[head] = slots
    rows = tuple(map(tuple, weights.reshape(shape.layers, shape.kv_heads).tolist()))
    return Policy(
        slots=round(weights.mean()),
        sinks=SINKS,
        budgets=Budgets(kind="sensitivity", exponent=1.0, weights=rows),
    )


def _rows(x: NDArray[np.float64]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(float(v) for v in row) for row in x)
