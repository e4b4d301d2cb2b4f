"""When a policy starts to evict; before it, all policies of the same bits have the same loss."""

from dataclasses import dataclass

from kvsearch.policy import ModelShape, Policy, layout


@dataclass(frozen=True)
class Exposure:
    """When a policy starts to evict, in tokens seen.

    Attributes:
        first: first eviction in any KV head; before it only quantisation loses something.
        mean: first eviction of a head, mean over heads.
    """

    first: float
    mean: float


def exposure(policy: Policy, shape: ModelShape) -> Exposure:
    """Tokens at which eviction starts in the first KV head and on average; infinite if never."""
    first, total, heads = float("inf"), 0.0, 0
    for layer in layout(policy, shape).layers:
        start, many = float("inf"), len(layer.heads)
        if policy.anchors is not None:
            start = 0.0  # at the first anchor, wherever that is
        elif layer.target is not None:
            start = float(layer.clock.after(layer.target) or start)
        first, total, heads = min(first, start), total + many * start, heads + many
    return Exposure(first, total / heads)
