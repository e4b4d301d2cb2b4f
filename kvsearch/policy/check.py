"""Whether a model of some shape can run a policy."""

from collections.abc import Sequence

from kvsearch.errors import PolicyError
from kvsearch.policy.channels import ALL, NONE
from kvsearch.policy.layout import layout
from kvsearch.policy.policy import Policy
from kvsearch.policy.shape import ModelShape
from kvsearch_kernels.codebooks import Codebook


def check(policy: Policy, shape: ModelShape, *, prompt: int | None = None) -> None:
    """Raise a `PolicyError` that says why a model of this shape cannot run the policy.

    Args:
        policy: what should run.
        shape: of the model.
        prompt: tokens of the prompt that one call brings in; None where that is not known yet.
    """
    p = policy
    if prompt == 0 and p.anchors is not None and p.anchors.protected == "prompt":
        raise PolicyError(
            "field anchors.protected: 'prompt' keeps a prompt, and none is given here; say how "
            "long it is, or give a range of tokens"
        )
    if prompt == 0 and p.compacts and p.trigger != "stream":
        raise PolicyError(
            f"field trigger: {p.trigger!r} compacts after a prompt, and none is given here; "
            "say how long it is, or use trigger 'stream'"
        )
    left, rule = p.channels.on(shape), p.active_rule
    if p.offset is not None:
        p.offset.check(shape)
    if p.quantizes:
        tiers = [t for some in p.every_tiers for t in some]
        low = min(t.key_bits for t in tiers), min(t.value_bits for t in tiers)
        for keys, values in left.kinds:
            whole = shape.head_dim
            k, v = p.quantizer.books
            columns = p.quantizer.along == "tokens"
            _check_format(p, low[0], keys, _named("key", "qk", keys, whole), k, columns)
            _check_format(p, low[1], values, _named("value", "vo", values, whole), v)
    if rule is not None and "queries" in rule.needs and not {ALL, NONE}.issuperset(p.channels.qk):
        raise PolicyError(
            f"field channels.qk: rule {rule.name!r} predicts attention from whole queries; keep "
            "all pairs or use another rule"
        )
    if rule is not None and "outputs" in rule.needs and not {ALL, NONE}.issuperset(p.channels.vo):
        raise PolicyError(
            f"field channels.vo: rule {rule.name!r} multiplies whole values by the output "
            "projection; keep all channels or use another rule"
        )
    if rule is not None and "hidden" in rule.needs and p.channels.active:
        raise PolicyError(
            f"field channels: the weights of rule {rule.name!r} were trained for a model with all "
            "channels; keep them or use another rule"
        )
    if p.rereads and p.anchors is not None:
        raise PolicyError(
            f"field anchors: tokens that are read again close no sequences; take another rule than "
            f"{'reread'!r}, or no anchors"
        )
    if p.budgets.across == "model" and len({*left.kinds} - {(0, 0)}) > 1:
        raise PolicyError(
            "field budgets.across: heads of the whole model share slots only where all are alike "
            "in their channels; use 'layer'"
        )
    if p.budgets.kind == "sensitivity":
        _fits("budgets.weights", p.budgets.weights, shape)
    if p.head_tiers is not None:
        _fits("head_tiers.of", p.head_tiers.of, shape)
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


def _named(what: str, axis: str, width: int, whole: int) -> str:
    if width == whole:
        return f"head size {width}"
    return f"{width} {what} channels that channels.{axis} leaves of a head"


def _check_format(
    p: Policy, bits: int, width: int, named: str, book: Codebook, columns: bool = False
) -> None:
    """Whether a vector of `width` channels can be stored in `bits`."""
    if bits == 16 or not width:
        return
    group = p.quantizer.group or width
    if not columns and book.numbers and width % group:
        raise PolicyError(f"field quantizer.group: {group} does not divide the {named}")
    if width % 8 and bits < 8:
        raise PolicyError(
            f"field tiers: the {named} cannot be packed in {bits} bits, being no multiple of 8"
        )
