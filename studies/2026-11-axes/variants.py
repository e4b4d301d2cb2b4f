"""The policies that the study compares, at one budget."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvsearch.errors import PolicyError
from kvsearch.knobs import Setting
from kvsearch.methods import at
from kvsearch.policy import Budgets, Policy, layout
from kvsearch.policy.marginal import Split

HERE = Path(__file__).parent
OUTCOME = HERE.parent / "2026-11-outcome"
SIZES = (20, 36, 68, 132, 260, 516, 1028)
LEAST = 0.03  # of the mean: what any head is taken to lose

Make = Callable[[], Policy]


def variants(budget: int, setting: Setting) -> dict[str, Make]:
    """Name -> how to build the policy."""
    found = Policy.from_json(OUTCOME / f"b{budget}" / "best.json")
    flat = found.model_copy(update={"ladder": None, "positions": "original"})
    heads = json.loads((HERE / "heads.json").read_text())
    base: dict[str, Make] = {
        "full": Policy,
        "found": lambda: found,
        "h2o+int4-fine": partial(at, "h2o+int4-fine", setting),
        "xmu+int4": partial(at, "xmu+int4", setting),
    }
    measured, priced = (heads[name]["losses"] for name in ("window 0", "priced slots"))
    curves = np.array(priced)
    for source, losses in (("measured", measured), ("priced", curves[:, SIZES.index(68)])):
        weights = rows(losses, setting)
        for e in (0.35, 0.5, 0.75):
            base[f"heads {source} {e}"] = partial(fitted, found, setting, by_weights(weights, e))
            base[f"flat heads {source} {e}"] = partial(
                fitted, flat, setting, by_weights(weights, e)
            )
    base["flat"] = partial(fitted, flat, setting, None)
    scale = np.array(measured) / curves[:, SIZES.index(68)]
    base["marginal"] = partial(marginal, found, setting, curves)
    base["marginal calibrated"] = partial(marginal, found, setting, curves * scale[:, None])
    base["flat marginal"] = partial(marginal, flat, setting, curves)
    base["flat marginal calibrated"] = partial(marginal, flat, setting, curves * scale[:, None])
    return base


def rows(losses: list[float], setting: Setting) -> np.ndarray:
    """Losses `[L, H]`, none below a share of their mean."""
    x = np.array(losses).reshape(setting.shape.layers, setting.shape.kv_heads)
    return np.maximum(x, LEAST * x.mean()) / x.mean()


def by_weights(weights: np.ndarray, exponent: float) -> Budgets:
    """Budgets in proportion to a power of `weights` `[L, H]`."""
    per_head = tuple(tuple(float(f"{x:.4g}") for x in row) for row in weights)
    return Budgets(kind="sensitivity", exponent=exponent, weights=per_head)


def fitted(policy: Policy, setting: Setting, budgets: Budgets | None, **other: Any) -> Policy:
    """`policy` with such budgets, and as many slots as the bytes pay for."""
    made = policy.model_copy(update={"budgets": budgets or policy.budgets, "about": {}, **other})
    low, high = 0, 4 * setting.tokens
    while low + 1 < high:
        mid = (low + high) // 2
        try:
            peak = layout(made.model_copy(update={"slots": mid}), setting.shape).bytes_peak(
                setting.tokens
            )
            low, high = (mid, high) if peak <= (setting.budget_bytes or 0) else (low, mid)
        except PolicyError:
            low = mid
    return Policy.build(made.model_copy(update={"slots": low}).plain())


def marginal(policy: Policy, setting: Setting, losses: np.ndarray, **other: Any) -> Policy:
    """`policy` whose slots follow the marginal loss of every head's priced curve."""
    made, curves = policy, np.column_stack([losses, np.zeros(len(losses))])
    for _ in range(3):  # the mean number of slots depends on the split where the text is short
        got = Split([*SIZES, setting.tokens], curves).at((made.slots or 0) * len(losses))
        weights = got.reshape(setting.shape.layers, -1)
        made = fitted(policy, setting, by_weights(weights / weights.mean(), 1.0), **other)
    return made
