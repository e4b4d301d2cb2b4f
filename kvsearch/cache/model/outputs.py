"""The output projection of a layer, for rules that weigh values by what they change in it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvsearch.models.given import require_plain
from kvsearch.models.projections import projections
from kvsearch.models.shape import shape_of
from kvsearch.policy import Policy


class Output:
    """One layer's output projection: weights of the model, which no cache copies or counts.

    Args:
        weight: `[hidden, Hq D]`.
        group: query heads of a KV head.
    """

    def __init__(self, weight: Tensor, group: int) -> None:
        self.weight, self.group = weight, group

    def __deepcopy__(self, memo: dict[int, Any]) -> "Output":
        return self

    def norms(self, heads: range) -> Callable[[Tensor], Tensor]:
        """Finds the L1 norm of `W_o v` for values of these KV heads, see `Place.output`."""

        def found(values: Tensor) -> Tensor:
            D = values.shape[-1]
            part = self.weight.unflatten(1, (-1, D))[:, heads.start * self.group :]
            each = part[:, : len(heads) * self.group].permute(1, 2, 0).float()
            out = []
            for row in values.float():
                moved = torch.bmm(row.repeat_interleave(self.group, 0), each).abs_().sum(-1)
                out.append(moved.unflatten(0, (len(heads), self.group)).mean(1))
            return torch.stack(out)

        return found


def outputs(policy: Policy, model: Any) -> list[Output | None]:
    """The projections of every layer, shallow to deep; None where the policy's rule reads none.

    Raises:
        ModelError: the model has fused or quantised projections, or adapters.
    """
    shape, rule = shape_of(model.config), policy.active_rule
    if rule is None or "outputs" not in rule.needs:
        return [None] * shape.layers
    what = f"rule {rule.name!r}"
    require_plain(model, what)
    group = shape.heads // shape.kv_heads
    return [Output(p.o.weight.detach(), group) for p in projections(model, f"{what} needs")]
