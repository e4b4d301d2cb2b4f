"""The layers of a cache under a policy, for whoever calls attention: transformers or a server."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvsearch.cache.channels import View
from kvsearch.cache.heads import advance
from kvsearch.cache.model.outputs import Output
from kvsearch.cache.model.predicted import Predictor
from kvsearch.cache.model.rotary import Rotary
from kvsearch.cache.state import LayerState
from kvsearch.policy import ModelShape, Policy, layout


@dataclass(frozen=True)
class Layer:
    """What one layer holds of one stream.

    Attributes:
        states: of its KV heads; those that are alike share one.
        view: what it loses of the model's channels, or None.
    """

    states: Sequence[LayerState]
    view: View | None = None

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: float | None = None
    ) -> Tensor:
        """Take in new tokens and attend from them, see `heads.advance`.

        What is deployed has no gradients, and so keeps no graph of the tokens that it holds.
        """
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.states[0].packed):
            if self.view is None:
                return advance(self.states, q, k, v, scale=scale, softcap=softcap)
            if self.view.removed:
                for state in self.states:
                    state.seen += q.shape[2]
                return v.new_zeros(*q.shape[:3], v.shape[3])
            out = advance(self.states, *self.view.kept(q, k, v), scale=scale, softcap=softcap)
            return self.view.whole(out, v.shape[3])

    @property
    def nbytes(self) -> int:
        """Bytes per sequence of everything held."""
        return sum(state.nbytes for state in self.states)


def empty_layers(
    policy: Policy,
    shape: ModelShape,
    rotaries: Sequence[Rotary | None],
    lost: Sequence[View | None],
    outputs: Sequence[Output | None] | None = None,
    predictors: Sequence[Predictor | None] | None = None,
    **options: Any,
) -> list[Layer]:
    """Layers that have seen nothing, shallow to deep.

    Args:
        policy: what they hold.
        shape: of the model.
        rotaries: the rotation of each layer's keys, where the policy needs it.
        lost: what each layer loses of its channels, see `channels.views`.
        outputs: the output projection of each layer, where the policy's rule reads it.
        predictors: the map of each layer, where the policy's rule predicts scores.
        options: of `LayerState`.
    """
    states: list[list[LayerState]] = [[] for _ in range(shape.layers)]
    for part in layout(policy, shape).layers:
        rotary, view = rotaries[part.layer], lost[part.layer]
        if view is not None:
            rotary = view.rotary(rotary, part.heads)
        output = None if outputs is None else outputs[part.layer]
        predictor = None if predictors is None else predictors[part.layer]
        states[part.layer].append(
            LayerState(part, rotary=rotary, output=output, predictor=predictor, **options)
        )
    return [Layer(mine, view) for mine, view in zip(states, lost, strict=True)]
