"""Weights that rules read beside keys and values: output projections, and maps that predict scores.

`Output` weighs values by what they change in a layer's output. `Predictor` makes scores of the
input of an attention layer, when its tokens arrive: a hook on the module that attends sees this
input and the cache that it goes to, and leaves the scores with its layer. What the layer takes in
next are these tokens.
"""

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvsearch.models.in_memory import require_plain
from kvsearch.models.learned import learned
from kvsearch.models.projections import projections
from kvsearch.models.shape import entrance, policy_layers, shape_of
from kvsearch.policy import Policy
from kvsearch.rules import KVzap


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


class Predictor:
    """One layer's map: weights beside the policy, which no cache copies or counts.

    Args:
        weight: `[H, hidden]`.
        bias: `[H]`.
    """

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        self.weight, self.bias = weight, bias

    def __deepcopy__(self, memo: dict[int, Any]) -> "Predictor":
        return self

    def __call__(self, x: Tensor) -> Tensor:
        """Scores `[B, H, M]` fp32 of inputs `[B, M, hidden]`.

        Sums are float64: inputs that are equal, as those of a repeated token in the first layer,
        get equal scores, however many tokens a call brings.
        """
        weight, bias = (y.to(x.device, torch.float64) for y in (self.weight, self.bias))
        return torch.nn.functional.linear(x.double(), weight, bias).mT.float()


def maps(policy: Policy, model: PreTrainedModel) -> list[Predictor | None]:
    """The map of every layer, shallow to deep; None where the policy's rule predicts nothing.

    Raises:
        PolicyError: the weights are missing, damaged or of another model.
        ModelError: the model has fused or quantised projections, or adapters.
    """
    rule = policy.active_rule
    if not isinstance(rule, KVzap):
        return [None] * shape_of(model.config).layers
    found = learned(rule, model)
    if model not in _watched:
        for i, p in zip(policy_layers(model.config), projections(model), strict=True):
            p.attention.register_forward_pre_hook(partial(_before, i), with_kwargs=True)
        _watched[model] = None
    device = entrance(model)
    each = zip(found.weight.to(device), found.bias.to(device), strict=True)
    return [Predictor(weight, bias) for weight, bias in each]


_watched: WeakKeyDictionary[PreTrainedModel, None] = WeakKeyDictionary()


def _before(layer: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The hook of one layer: leave the scores with it."""
    cache = kwargs.get("past_key_values")
    x = kwargs.get("hidden_states", args[0] if args else None)
    here = getattr(cache, "layers", ())[layer : layer + 1]
    held = getattr(here[0], "held", None) if here else None
    predictor: Predictor | None = getattr(held, "predictor", None)
    if held is not None and predictor is not None and x is not None:
        held.predicted = predictor(x.detach())
