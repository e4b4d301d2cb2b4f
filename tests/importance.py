"""What a measurement of channels would have found: any numbers, the same for the same shape."""

import random

from kvsearch.policy import ModelShape
from kvsearch.policy.pruning import SCORES, Importance, Order, Orders


def importance(shape: ModelShape) -> Importance:
    """Rises in perplexity that differ, and an order of its own for every score, layer and head."""
    draw = random.Random(0)

    def order(channels: int) -> Order:
        one = range(channels)
        return tuple(
            tuple(tuple(draw.sample(one, channels)) for _ in range(shape.kv_heads))
            for _ in range(shape.layers)
        )

    half = shape.head_dim // 2
    orders = {s: Orders(order(half), order(half), order(shape.head_dim)) for s in SCORES}
    return Importance(tuple(draw.uniform(0, 3) for _ in range(shape.layers)), orders)
