"""The policies that the study compares, at one budget."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from kvsearch.errors import PolicyError
from kvsearch.policy import Budgets, HeadLosses, HeadTiers, Policy, Quantizer, Tier, layout
from kvsearch.policy_space import Setting
from kvsearch.policy_space.by_head import head_tiers
from kvsearch.policy_space.marginal import Split, choose
from kvsearch.policy_space.methods import at
from kvsearch.rules import Attention

HERE = Path(__file__).parent
OUTCOME = HERE.parent / "2026-11-outcome"
SIZES = (20, 36, 68, 132, 260, 516, 1028)
LEAST = 0.03  # of the mean: what any head is taken to lose

Make = Callable[[], Policy]


def variants(budget: int, setting: Setting) -> dict[str, Make]:
    """Name -> how to build the policy."""
    found = Policy.from_json(OUTCOME / f"b{budget}" / "best.json")
    flat = found.model_copy(update={"ladder": None, "positions": "original"})
    plain = at("rotated+sensitivity", replace(setting, sensitivity=layers(budget)))
    designed = plain.model_copy(update={"recent_window": 64 if budget > 128 else 32})
    heads = json.loads((HERE / "heads.json").read_text())
    base: dict[str, Make] = {
        "full": Policy,
        "found": lambda: found,
        "h2o+int4-fine": partial(at, "h2o+int4-fine", setting),
        "xmu+int4": partial(at, "xmu+int4", setting),
    }
    starved = SIZES.index(68)
    each = [np.array(heads[f"priced slots {i}"]["losses"]) for i in range(4)]
    measured, curves = np.array(heads["measured 0"]["losses"]), np.mean(each, 0)
    ratio = measured / each[0][:, starved]  # of what was measured to what was estimated, window 0
    sources = {
        "measured": measured,
        "priced": each[0][:, starved],
        "pooled": curves[:, starved],
        "mixed": curves[:, starved] * ratio,
    }
    joined = curves * ratio[:, None]
    for word, policy in (("", found), ("flat ", flat), ("designed ", designed)):
        base[f"{word}layers"] = partial(fitted, policy, setting, None)
        base[f"{word}even"] = partial(fitted, policy, setting, Budgets())
        for source, losses in sources.items():
            weights = rows(losses, setting)
            for e in (0.35, 0.5, 0.75):
                budgets = by_weights(weights, e)
                base[f"{word}heads {source} {e}"] = partial(fitted, policy, setting, budgets)
        half = by_weights(rows(measured, setting), 0.5)
        bits = partial(with_bits, policy, setting, heads)
        base[f"{word}bits by layer"] = partial(bits, "layer", None)
        base[f"{word}bits by head"] = partial(bits, "head", None)
        base[f"{word}heads measured 0.5, bits by layer"] = partial(bits, "layer", half)
        base[f"{word}heads measured 0.5, bits by head"] = partial(bits, "head", half)
        base[f"{word}marginal"] = partial(marginal, policy, setting, curves)
        base[f"{word}marginal calibrated"] = partial(marginal, policy, setting, joined)
        base[f"{word}joint"] = partial(joint, policy, setting, heads, joined)
        if policy.ladder is None and policy.rule is not None:
            base[f"{word}adakv"] = partial(fitted, policy, setting, Budgets(kind="adakv"))
    best = by_weights(rows(measured, setting), 0.5)
    turns: dict[str, dict[str, Any]] = {
        "k8v4": dict(tiers=_tiers(8, 4)),
        "k5v5": dict(tiers=_tiers(5, 5)),
        "k5v4": dict(tiers=_tiers(5, 4)),
        "k4v5": dict(tiers=_tiers(4, 5)),
        "k4v3": dict(tiers=_tiers(4, 3)),
        "k3v3": dict(tiers=_tiers(3, 3)),
        "interval 8": dict(interval=8),
        "interval 32": dict(interval=32),
        "128 recent": dict(recent_window=128),
        "16 recent": dict(recent_window=16),
        "h2o": dict(rule=Attention()),
        "alpha 1, beta 0.5": dict(rule=Attention(alpha=1, beta=0.5)),
        "horizon 1024": dict(rule=Attention(alpha=1, beta=1, horizon=1024, kind="decay")),
        "pooled": dict(rule=Attention(alpha=1, beta=1, pool=5)),
    }
    for name, change in turns.items():
        turned = designed.model_copy(update=change)
        base[f"designed heads measured 0.5, {name}"] = partial(fitted, turned, setting, best)
    whole = designed.model_copy(update=dict(slots=None, budgets=Budgets(), about={}))
    base["designed, nothing evicted"] = lambda: Policy.build(whole.plain())
    aged = designed.model_copy(
        update=dict(rule=None, recent_window=0, sinks=32, interval=32)
    )  # what keys along tokens need: eviction by age, in whole groups
    along = Quantizer(group=32, along="tokens", fp16_sinks=True)
    base["by age, rotated"] = partial(fitted, aged, setting, None)
    base["by age, keys along tokens"] = partial(fitted, aged, setting, None, quantizer=along)
    return base


def layers(budget: int) -> tuple[float, ...]:
    """Sensitivity per layer, as the outcome study measured it."""
    file = OUTCOME / f"b{budget}" / "sensitivity.json"
    return tuple(json.loads(file.read_text())["per_layer"])


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


def with_bits(
    policy: Policy, setting: Setting, heads: dict[str, Any], per: str, budgets: Budgets | None
) -> Policy:
    """`policy` with bits per layer or head by their marginal loss, at the same mean."""
    told = HeadLosses(
        heads=setting.shape.kv_heads,
        sizes=SIZES,
        slots=tuple(map(tuple, heads["priced slots 0"]["losses"])),
        bits=(8, 4, 3, 2),
        keys=tuple(map(tuple, heads["priced keys 0"]["losses"])),
        values=tuple(map(tuple, heads["priced values 0"]["losses"])),
        starved=68,
    )
    return fitted(policy, setting, budgets, head_tiers=head_tiers(per, policy.tiers, told))


def joint(policy: Policy, setting: Setting, heads: dict[str, Any], curves: np.ndarray) -> Policy:
    """`policy` whose slots and bits are split together: bytes go where they save most."""
    grid = np.unique(np.geomspace(policy.interval + 24, setting.tokens, 24).astype(int))
    bits, D = (8, 4, 3, 2), setting.shape.head_dim
    keys, values = (np.array(heads[f"priced {x} 0"]["losses"]) for x in ("keys", "values"))
    options = list(product(range(len(grid)), range(len(bits)), range(len(bits))))
    costs = [float(grid[s] * (D * (bits[k] + bits[v]) / 8 + 8 + 4)) for s, k, v in options]
    losses = []
    for curve, key, value in zip(curves, keys, values, strict=True):
        lost = np.interp(grid, [*SIZES, setting.tokens], [*curve, 0.0])
        losses.append([lost[s] + key[k] + value[v] for s, k, v in options])
    room = (setting.budget_bytes or 0) - len(curves) * policy.interval * 4 * D
    picked = [options[i] for i in choose(losses, [costs] * len(losses), room)]
    used = sorted({(bits[k], bits[v]) for _, k, v in picked}, reverse=True)
    tiers = [(Tier.model_validate(dict(key_bits=k, value_bits=v)),) for k, v in used]
    of = np.array([used.index((bits[k], bits[v])) + 1 for _, k, v in picked])
    of = of.reshape(setting.shape.layers, -1)
    sizes = np.array([grid[s] for s, _, _ in picked], dtype=float).reshape(of.shape)
    told = HeadTiers.model_validate(dict(others=tiers, of=of.tolist()))
    return fitted(policy, setting, by_weights(sizes / sizes.mean(), 1.0), head_tiers=told)


def _tiers(keys: int, values: int) -> tuple[Tier, ...]:
    return (Tier.model_validate(dict(key_bits=keys, value_bits=values)),)
