"""Whether a model of some shape can run a policy."""

from collections.abc import Sequence

from kvsearch.errors import PolicyError
from kvsearch.policy.layout import layout
from kvsearch.policy.parts import Channels
from kvsearch.policy.shape import ModelShape
from kvsearch.policy.types import Policy
from kvsearch_kernels.codebooks import CODEBOOKS


def check(policy: Policy, shape: ModelShape, *, prompt: int | None = None) -> None:
    """Raise a `PolicyError` that says why a model of this shape cannot run the policy.

    Args:
        policy: what should run.
        shape: of the model.
        prompt: tokens of the prompt that one call brings in; None where that is not known yet.
    """
    p = policy
    if p.anchors is not None:
        raise PolicyError("field anchors: this version does not execute anchors yet")
    if p.channels != Channels():
        raise PolicyError("field channels: this version does not execute channel pruning yet")
    if prompt == 0 and p.compacts and p.trigger != "stream":
        raise PolicyError(
            f"field trigger: {p.trigger!r} compacts after a prompt, and none is given here; "
            "say how long it is, or use trigger 'stream'"
        )
    if p.quantizes:
        group = p.quantizer.group or shape.head_dim
        tiers = [t for some in p.every_tiers for t in some]
        grouped = any(t.value_bits < 16 for t in tiers) or p.quantizer.along == "channels"
        grouped &= CODEBOOKS[p.quantizer.levels].numbers > 0
        if grouped and shape.head_dim % group:
            raise PolicyError(
                f"field quantizer.group: {group} does not divide the head size {shape.head_dim}"
            )
        low = min(b for t in tiers for b in (t.key_bits, t.value_bits))
        if shape.head_dim % 8 and low < 8:
            raise PolicyError(
                f"field tiers: head size {shape.head_dim} is no multiple of 8, so {low} bits "
                "cannot be packed"
            )
    if p.budgets.kind == "sensitivity":
        _fits("budgets.weights", p.budgets.weights, shape)
    if p.head_tiers is not None:
        _fits("head_tiers.of", p.head_tiers.of, shape)
    rule = p.active_rule
    if p.per_head and rule is not None and rule.share == "layer":
        raise PolicyError(
            "field rule.share: heads that choose their slots together ('layer') cannot differ in "
            "slots or tiers; use 'head'"
        )
    if p.ladder is not None and shape.layers < 2:
        raise PolicyError("field ladder: a ladder needs at least 2 layers")
    layout(p, shape)


def _fits(where: str, rows: Sequence[object], shape: ModelShape) -> None:
    """Refuse a list that has not one entry a layer, or per layer one a KV head."""
    if len(rows) != shape.layers:
        raise PolicyError(
            f"field {where}: {len(rows)} layers for a model with {shape.layers}; the policy was "
            "made for another shape"
        )
    for i, row in enumerate(rows):
        if isinstance(row, tuple) and len(row) != shape.kv_heads:
            raise PolicyError(
                f"field {where}: {len(row)} heads in layer {i} of a model with {shape.kv_heads} KV "
                "heads; the policy was made for another shape"
            )
