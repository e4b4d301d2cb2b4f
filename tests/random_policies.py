"""Random policies over the whole type, for tests that must hold for every policy."""

import random
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np

from kvsearch.errors import PolicyError
from kvsearch.policy import (
    Budgets,
    Channels,
    HeadTiers,
    Ladder,
    ModelShape,
    Offset,
    Policy,
    Quantizer,
    Tier,
    check,
)
from kvsearch.policy.key_offset import word
from kvsearch.rules import RULES, Attention, Rule
from kvsearch_kernels.codebooks import CODEBOOKS


def rule(draw: random.Random, interval: int) -> Rule | None:
    """Any rule of the table, or none; sums of attention half of the time."""
    kind = draw.choice(["age", "attention", "attention", "other"])
    if kind == "age":
        return None
    if kind == "other":
        some = [r for r in RULES.values() if r is not Attention and "hidden" not in r.needs]
        return draw.choice(some)()  # weights that are learned are of one model
    window = draw.choice(["window", "decay"])
    horizon = draw.choice([None, 1, interval, 3 * interval])
    return Attention(
        alpha=draw.choice([0, 1]),
        beta=draw.choice([0, 0.5, 1]),
        horizon=horizon,
        kind=window,
        literal=draw.random() < 0.2,
        share=draw.choice(["head", "layer"]),
        pool=draw.choice([1, 1, 3]),
        pool_kind=draw.choice(["avg", "max"]),
    )


def tier(draw: random.Random, keys: tuple[int, ...], values: tuple[int, ...]) -> Tier:
    """A tier of any of these bits of keys and of values."""
    return Tier.model_validate(dict(key_bits=draw.choice(keys), value_bits=draw.choice(values)))


def per_layer(draw: random.Random, shape: ModelShape, one: Callable[[], Any]) -> tuple[Any, ...]:
    """Something for every layer, or for every KV head of every layer."""
    if draw.random() < 0.5:
        return tuple(one() for _ in range(shape.layers))
    return tuple(tuple(one() for _ in range(shape.kv_heads)) for _ in range(shape.layers))


def policy(draw: random.Random, shape: ModelShape) -> Policy:
    """One policy that a model of `shape` can run; its prompt, if it waits for one, is given."""
    while True:
        interval = draw.choice([1, 3, 8, 16])
        shares = draw.choice([[1.0], [1.0], [0.3, 0.7], [0.2, 0.3, 0.5]])
        levels, value_levels = draw.choice([*CODEBOOKS]), draw.choice([None, None, *CODEBOOKS])
        books = CODEBOOKS[levels], CODEBOOKS[value_levels or levels]
        bits, value_bits = ((16, *book.bits) for book in books)
        keys = sorted(draw.choices(bits, k=len(shares)), reverse=True)
        values = sorted(draw.choices(value_bits, k=len(shares)), reverse=True)
        budgets = draw.choice(["uniform", "pyramid", "sensitivity"])
        weights = per_layer(draw, shape, partial(draw.uniform, 0.5, 2))
        others = [tier(draw, bits, value_bits) for _ in range(draw.choice([0, 0, 1, 2]))]
        of = per_layer(draw, shape, partial(draw.randrange, len(others) + 1))
        slots = draw.choice([None, 28, 40, 60])
        ranks, trigger = (
            rule(draw, interval),
            draw.choice(["stream", "stream", "prompt", "prompt+stream"]),
        )
        if ranks is not None and "rereading" in ranks.needs:
            trigger = "prompt"
        try:
            made = Policy(
                slots=slots,
                interval=interval,
                trigger=trigger,
                sinks=draw.choice([0, 2, 5]),
                recent_window=draw.choice([0, 1, 4, 12]),
                budgets=Budgets(
                    kind=budgets,
                    beta=draw.choice([2, 20]),
                    of=draw.choice(["total", "rest"]) if budgets == "pyramid" else "total",
                    exponent=draw.choice([0.5, 1]),
                    weights=weights if budgets == "sensitivity" else (),
                ),
                ladder=draw.choice(
                    [
                        None,
                        None,
                        Ladder(span=0.5, overlap=0.3, order=draw.choice(["modular", "contiguous"])),
                    ]
                )
                if slots
                else None,
                rule=ranks,
                tiers=tuple(
                    Tier(share=s, key_bits=k, value_bits=v)
                    for s, k, v in zip(shares, keys, values, strict=True)
                ),
                head_tiers=HeadTiers(others=tuple((t,) for t in others), of=of) if others else None,
                quantizer=Quantizer(
                    group=books[0].group or books[1].group or draw.choice([8, 16, None]),
                    rotate=draw.random() < 0.3,
                    value_block=draw.choice([None, 8, 1]),
                    levels=levels,
                    value_levels=value_levels,
                    fp16_sinks=draw.random() < 0.5,
                ),
                positions=draw.choice(["original", "original", "cache"]),
            )
            check(made, shape)
        except (PolicyError, ValueError):
            continue
        return with_refit(with_offset(made, shape))


def with_refit(policy: Policy) -> Policy:
    """The policy, with fitted values or biases where it can have them; nothing is drawn."""
    if not (policy.rereads and policy.evicts) or policy.positions == "cache":
        return policy
    how = ("none", "values", "values+bias")[int(policy.fingerprint(), 16) % 3]
    return policy.model_copy(update={"refit": how})


def with_offset(policy: Policy, shape: ModelShape) -> Policy:
    """The policy, or every other one that can have it with an offset; nothing is drawn for it."""
    if not policy.quantizes or policy.positions == "cache" or int(policy.fingerprint(), 16) % 2:
        return policy
    quantizer = policy.quantizer.model_copy(update={"offset": offset(shape)})
    return policy.model_copy(update={"quantizer": quantizer})


def offset(shape: ModelShape, seed: int = 0, size: float = 3.0) -> Offset:
    """Vectors of `size` a channel, of no model."""
    drawn = np.random.default_rng(seed).normal(
        0, size, (shape.layers, shape.kv_heads * shape.head_dim)
    )
    scales = np.exp(np.random.default_rng(seed + 1).normal(0, 0.5, drawn.shape))
    return Offset(
        keys=tuple(word(x) for x in drawn), scales=tuple(word(x) for x in scales), sample=""
    )


@cache
def policies(count: int, shape: ModelShape, seed: int = 0) -> tuple[Policy, ...]:
    """`count` policies; the same ones for the same arguments."""
    draw = random.Random(seed)
    return tuple(policy(draw, shape) for _ in range(count))


def traits(policy: Policy) -> set[tuple[str, Any]]:
    """What a policy is made of: each field with its value, and of numbers whether 0, 1 or more.

    Which channels it removes says nothing about its cache but that there are fewer.
    """
    found = set()

    def see(field: str, x: Any) -> None:
        if isinstance(x, dict):
            for key, value in x.items():
                see(f"{field}.{key}", value)
        elif isinstance(x, list | tuple):
            found.add((field, min(len(x), 2)))
            for value in x:
                see(field, value)
        else:
            exact = isinstance(x, str | bool | None) or field.endswith("bits")
            found.add((field, x if exact or x in (0, 1) else "more"))

    see("", policy.model_dump(exclude={"name", "about", "channels"}))
    return found | {("channels", policy.channels == Channels())}


def covering(named: dict[str, Policy]) -> list[str]:
    """Few of these policies that have among them every trait of all: each rule, tier, trigger."""
    has = {name: traits(policy) for name, policy in named.items()}
    left, chosen = set().union(*has.values()), list[str]()
    while left:
        chosen.append(max(has, key=lambda name: len(has[name] & left)))
        left -= has[chosen[-1]]
    return chosen
