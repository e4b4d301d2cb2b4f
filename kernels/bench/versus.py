"""Attention over a prompt where keys have lives: FlexAttention's masks against our kernel.

A query i sees key j where `birth[j] <= i < death[j]`, and an anchor sees no earlier anchor.
Windows, LaCache's ladder and AnLLM's anchors are such patterns. SDPA and flash-attn attend to
everything.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from pool import emit, sentence
from timing import device, replay, spread, stands_in
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from kvsearch.cache.by_age.plans import plan
from kvsearch.policy import ModelShape, layout
from kvsearch.policy_space import Setting
from kvsearch.policy_space.methods import at
from kvsearch_kernels.lifetime_attention import lifetime_attention

LARGE = ModelShape(layers=32, kv_heads=8, head_dim=128, heads=32)
SMALL = ModelShape(layers=4, kv_heads=1, head_dim=64, heads=2)
SENTENCE = 32  # tokens that an anchor sums up
SECONDS = 0.3  # of replays
NEVER = 1 << 40
NEAR = 0.02  # relative distance of two results in bf16


def lives(
    pattern: str, shape: ModelShape, T: int, slots: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Birth and death of every key `[T]`, and which of them are anchors."""
    place = torch.arange(T)
    if pattern == "window":
        return place, place + slots, None
    if pattern == "anchors":
        last = (place // SENTENCE + 1) * SENTENCE - 1
        alone = place == last
        return place, torch.where(alone, NEVER, last + 1), alone
    assert pattern == "ladder", pattern
    policy = at("lacache", Setting(shape, shape.budget_bytes(slots), T))
    known = plan(layout(policy, shape).layers[shape.layers // 2], T, 0)
    birth, death = np.full(T, NEVER), np.zeros(T, dtype=np.int64)
    np.minimum.at(birth, known.token, known.birth)  # an entry for each frame of positions
    np.maximum.at(death, known.token, known.death)
    return torch.from_numpy(birth), torch.from_numpy(death), None


def compare(pattern: str, context: int, slots: int) -> None:
    """Time every implementation of a pattern, and say how far FlexAttention's result is off."""
    kind = torch.float32 if stands_in() else torch.bfloat16
    shape = SMALL if stands_in() else LARGE
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    q, k, v = (
        torch.randn(1, h, context, shape.head_dim, device=device(), dtype=kind) for h in heads
    )
    birth, death, alone = lives(pattern, shape, context, slots)
    birth, death = birth.to(device()), death.to(device())
    more: dict[str, Any] = {"first_query": 0, "scale": shape.head_dim**-0.5}
    if alone is not None:
        alone = alone.to(device())
        more["anchors"] = torch.where(alone, birth, -1)
    impl = "reference" if stands_in() else "triton"
    share = float(
        torch.stack([((birth <= i) & (death > i)).sum() for i in range(0, context, 61)])
        .float().mean() * 2 / context
    )  # fmt: skip
    shared = {"pattern": pattern, "context": context, "slots": slots, "pairs": round(share, 4)}

    def ours() -> Tensor:
        return lifetime_attention.run(impl, q, k, v, birth, death, **more)[0]

    want = ours()
    emit(**shared, impl="ours", ms=spread(replay([ours], SECONDS)))
    others: dict[str, Callable[[], Callable[[], Tensor]]] = {
        "flex": lambda: _flex(q, k, v, birth, death, alone),
        "sdpa, everything": lambda: (
            lambda: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        ),
    }
    if find_spec("flash_attn") is not None:
        others["flash-attn, everything"] = lambda: _flash(q, k, v)
    for name, made in others.items():
        try:
            run = made()
            got = run()
            found: dict[str, Any] = {"ms": spread(replay([run], SECONDS))}
            if name == "flex":
                off = float((got - want).float().norm() / want.float().norm())
                found["off"] = float(f"{off:.2g}")
                if not off < NEAR:
                    found["reason"] = f"it is off by {off:.2g} of our result"
        except Exception as error:  # whatever a compiler or a launch may raise
            found = {"reason": sentence(error)}
            if "CUDA error" in found["reason"]:
                raise
        emit(**shared, impl=name, **found)


def _flex(
    q: Tensor, k: Tensor, v: Tensor, birth: Tensor, death: Tensor, alone: Tensor | None
) -> Callable[[], Tensor]:
    """FlexAttention over what keys' lives let it see; masks of blocks are made once."""

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        sees = (birth[j] <= i) & (i < death[j])
        return sees if alone is None else sees & ~(alone[i] & alone[j] & (j < i))

    n, where = q.shape[2], device()
    mask = create_block_mask(seen, None, None, n, n, device=where.type)
    run = flex_attention if stands_in() else torch.compile(flex_attention)
    return lambda: run(q, k, v, block_mask=mask, enable_gqa=True)


def _flash(q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    from flash_attn import flash_attn_func

    turned = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    return lambda: flash_attn_func(*turned, causal=True)
