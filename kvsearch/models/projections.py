"""The four matrices of every attention layer, for what works on the channels of a head."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from kvsearch.errors import ModelError
from kvsearch.models.shape import decoder_layers, policy_layers, shape_of, text_config

NAMES = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True, eq=False)
class Projections:
    """One layer's; channel c of a head is a row of queries, keys and values, a column of outputs.

    Attributes:
        attention: the module that holds them.
        q: `[Hq D, hidden]`.
        k, v: `[H D, hidden]`.
        o: `[hidden, Hq D]`.
    """

    attention: nn.Module
    q: nn.Linear
    k: nn.Linear
    v: nn.Linear
    o: nn.Linear


def projections(model: Any, what: str = "channels need") -> list[Projections]:
    """Those of every layer that a policy governs, shallow to deep.

    Args:
        model: it.
        what: needs them, for the message.

    Raises:
        ModelError: the model has fused or quantised matrices, or others than its config says.
    """
    shape, blocks = shape_of(model.config), decoder_layers(model)
    rows, columns = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    found = []
    for i in policy_layers(model.config):
        candidates = blocks[i].modules() if i < len(blocks) else ()
        attention = next((m for m in candidates if all(hasattr(m, n) for n in NAMES)), None)
        made: list[Any] = [getattr(attention, n, None) for n in NAMES]
        sizes = [x.out_features if isinstance(x, nn.Linear) else 0 for x in made]
        if attention is None or sizes[:3] != [rows, columns, columns] or shape.widths:
            raise ModelError(
                f"{what} whole query, key, value and output projections apart from each "
                f"other, and layer {i} of this {text_config(model.config).model_type!r} model has "
                "none that kvsearch knows"
            )
        found.append(Projections(attention, *made))
    return found
