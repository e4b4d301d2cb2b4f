"""What a measurement of KV heads would give, for tests that need some."""

from kvsearch.policy import HeadLosses, ModelShape


def losses(shape: ModelShape) -> HeadLosses:
    """Every KV head loses less with more slots and more bits, and no two the same."""
    sizes, bits = (16, 64, 256, 1024), (8, 4, 3, 2)
    each = [0.5 + i for i in range(shape.layers * shape.kv_heads)]
    return HeadLosses(
        shape.kv_heads,
        sizes,
        tuple(tuple(x / s for s in sizes) for x in each),
        bits,
        tuple(tuple(x * 4.0**-b for b in bits) for x in each),
        tuple(tuple(x * 3.0**-b for b in bits) for x in each),
        starved=16,
    )
