"""The linear maps of rule `kvzap`, fitted to a model: ridge regression in closed form.

The model reads every context twice, as rule `reread` has it. Inputs of the attention layers are the
first reading's, targets the logarithms of what the second one gives to every token. The products
that the solution needs are summed in float64, so that no input is kept and no step size chosen.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvsearch.errors import ModelError
from kvsearch.evaluation.replay import deployed
from kvsearch.models.head import Head
from kvsearch.models.learned import Learned, sample_of
from kvsearch.models.load import LoadedModel
from kvsearch.models.projections import projections
from kvsearch.policy import Policy
from kvsearch.rules import Place, Reread
from kvsearch.rules.reread import RereadScorer

SINKS = 4  # first tokens, which are kept anyway, and not like others
RIDGE = 0.03  # on inputs of variance 1, per token
LEAST = 1e-9  # of a score, before its logarithm

Layers = list[tuple[Tensor, Tensor]]  # inputs `[M, hidden]` and targets `[M, H]` of every layer


@dataclass(frozen=True, eq=False)
class Fit:
    """What was fitted.

    Attributes:
        learned: the weights.
        explained: share of the targets' variance in held-out contexts that is predicted, of every
            KV head `[L, H]`; at most 1.
    """

    learned: Learned
    explained: NDArray[np.float64]


def fit(
    loaded: LoadedModel,
    contexts: NDArray[np.int64],
    held_out: NDArray[np.int64],
    progress: Callable[[], None] = lambda: None,
) -> Fit:
    """Fit the maps to contexts `[W, T]`, and compare them with the scores of others.

    Args:
        loaded: the model.
        contexts: that are learned from.
        held_out: that are predicted.
        progress: called after every context.

    Raises:
        ModelError: the model's layers do not show their inputs, or have fused projections.
    """
    sums: list[_Sums] = []
    sample = sample_of(loaded.model)
    reader = _Reader(loaded)
    for layers in reader.read(contexts):
        sums = sums or [_Sums(x, y) for x, y in layers]
        for one, (x, y) in zip(sums, layers, strict=True):
            one.add(x, y)
        progress()
    maps = [one.solve() for one in sums]
    weight, bias = (torch.stack(found).float().cpu() for found in zip(*maps, strict=True))
    left, spread, mean = (torch.zeros_like(bias, dtype=torch.float64) for _ in range(3))
    count = 0
    for layers in reader.read(held_out):
        x = torch.stack([x for x, _ in layers]).double().cpu()
        y = torch.stack([y for _, y in layers]).double().cpu()
        left += (x @ weight.double().mT + bias.double()[:, None] - y).square().sum(1)
        spread, mean, count = spread + y.square().sum(1), mean + y.sum(1), count + y.shape[1]
        progress()
    variance = (spread - mean**2 / count).clamp_min(1e-12)
    explained = (1 - left / variance).numpy()
    return Fit(Learned(weight, bias, sample, loaded.name), explained)


class _Sums:
    """Sums over tokens of one layer, for inputs `[M, hidden]` and targets `[M, H]` like these."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        C, H = x.shape[1] + 1, y.shape[1]
        self.inner = torch.zeros(C, C, dtype=torch.float64, device=x.device)
        self.outer = torch.zeros(C, H, dtype=torch.float64, device=x.device)

    def add(self, x: Tensor, y: Tensor) -> None:
        """The last column of the inputs is 1, so these sums have the means, too."""
        x = torch.nn.functional.pad(x.double(), (0, 1), value=1.0)
        self.inner += x.mT @ x
        self.outer += x.mT @ y.double()

    def solve(self) -> tuple[Tensor, Tensor]:
        """Weight `[H, hidden]` and bias `[H]`: ridge regression on standardised inputs."""
        n = self.inner[-1, -1]
        mean, target = self.inner[:-1, -1] / n, self.outer[-1] / n
        inner = self.inner[:-1, :-1] / n - torch.outer(mean, mean)
        outer = self.outer[:-1] / n - torch.outer(mean, target)
        scale = inner.diagonal().clamp_min(1e-12).sqrt()
        ridge = RIDGE * torch.eye(len(scale), dtype=scale.dtype, device=scale.device)
        found = torch.linalg.solve(
            inner / torch.outer(scale, scale) + ridge, outer / scale[:, None]
        )
        weight = (found / scale[:, None]).mT
        return weight, target - weight @ mean


class _Reader:
    """Reads contexts twice, and hands over what went into the layers and what came of it."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded, self._head = loaded, Head(loaded.model, loaded.silent)
        self._attention = [p.attention for p in projections(loaded.model, "rule 'kvzap' needs")]

    def read(self, contexts: NDArray[np.int64]) -> Iterator[Layers]:
        """Inputs and targets of every context but for its sinks, in turn."""
        for row in contexts:
            policy = Policy(
                slots=len(row) + 2, sinks=SINKS, trigger="prompt", rule=_Noted(instruction="repeat")
            )
            cache = deployed(self._loaded, policy, packed=False)
            ids = torch.from_numpy(row[None]).to(self._loaded.device)
            with torch.inference_mode(), _Inputs(self._attention) as inputs:
                self._head.hidden(ids, cache)
            if len(inputs.found) != len(self._attention):
                raise ModelError(
                    f"the layers of {self._loaded.name} do not show what goes into them, which "
                    "rule 'kvzap' predicts from; use another rule"
                )
            scores = [g.scorer.scores for g in cache.groups if isinstance(g.scorer, _Noting)]
            yield [
                (inputs.found[i][0, SINKS:], y[0, :, SINKS:].clamp_min(LEAST).log().mT)
                for i, y in enumerate(scores)
                if y is not None
            ]


class _Inputs:
    """Notes what goes into attention layers first, while it is entered.

    Attributes:
        found: `[1, M, hidden]` by layer.
    """

    def __init__(self, attention: Sequence[Any]) -> None:
        self._attention, self.found = attention, dict[int, Tensor]()

    def __enter__(self) -> "_Inputs":
        def noted(layer: int) -> Any:
            def look(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                x = kwargs.get("hidden_states", args[0] if args else None)
                if x is not None:
                    self.found.setdefault(layer, x)

            return look

        self._hooks = [
            module.register_forward_pre_hook(noted(i), with_kwargs=True)
            for i, module in enumerate(self._attention)
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()


class _Noting(RereadScorer):
    """Keeps its scores through the compaction."""

    def keep(self, index: Tensor | None) -> None:
        """Nothing was dropped."""


class _Noted(Reread):
    """The rule `reread`, whose scores stay with its scorers."""

    def scorer(self, place: Place) -> RereadScorer:
        """One that keeps its scores."""
        return _Noting()
