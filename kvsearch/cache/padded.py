"""Left-padded batches: every row has states of its own, and gives what it would give alone.

Padding comes in front of a prompt, in the first call of a batch of unequal prompts. Its tokens are
never taken in: each row's states see that row's own tokens, one row after the other, so that any
policy is exact, at the cost of the rows' products.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvsearch.cache.channels import View
from kvsearch.cache.layers import Layer
from kvsearch.cache.state import LayerState
from kvsearch.errors import ModelError

KNOWN = "kvsearch_padding"  # on a mask that all layers of one call are given


@dataclass
class Rows:
    """One layer's states for each row of a batch.

    Attributes:
        padding: tokens in front of each row.
        states: of each row, as a layer has them that holds one sequence.
        view: what the layer loses of the model's channels, or None.
    """

    padding: list[int]
    states: list[Sequence[LayerState]]
    view: View | None

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: float | None
    ) -> Tensor:
        """As `Layer.attend`, row by row; what padding attends to is 0."""
        out = q.new_zeros(*q.shape[:3], v.shape[3])
        for i, (skip, states) in enumerate(zip(self.padding, self.states, strict=True)):
            first = 0 if states[0].seen else skip
            own = (x[i : i + 1, :, first:] for x in (q, k, v))
            for state in states:
                if state.predicted is not None:  # of all rows and of the padding
                    seen, scores = state.predicted
                    state.predicted = seen, scores[i : i + 1, :, first:]
            layer = Layer(states, self.view)
            out[i : i + 1, :, first:] = layer.attend(*own, scale=scale, softcap=softcap)
        return out

    def reorder(self, rows: Sequence[int]) -> None:
        """Select rows, some of them several times."""
        self.padding = [self.padding[i] for i in rows]
        self.states = [copied(self.states[i]) for i in rows]

    @property
    def fullest(self) -> Sequence[LayerState]:
        """States of the row that holds most bytes."""
        return max(self.states, key=lambda states: sum(state.nbytes for state in states))


def copied(states: Sequence[LayerState]) -> Sequence[LayerState]:
    """States that go on by themselves."""
    same = [x for s in states for x in (s.layer, s.empty, s.rule, s.rotary) if x is not None]
    return [*deepcopy(states, {id(x): x for x in same})]


def left(shown: Tensor, rows: int, new: int) -> list[int] | None:
    """Tokens of padding in front of each row of a first call, or None if there are none.

    Args:
        shown: what the mask shows `[B, N]`, or `[B, 1, N, N]`.
        rows: of the batch.
        new: tokens of the call.
    """
    if len(shown) != rows or shown.shape[-1] != new:
        return None
    last = shown if shown.dim() == 2 else shown[:, 0, -1]
    padding: list[int] = (~last).sum(-1).tolist()
    if not any(padding) or max(padding) == new:
        return None
    causal = torch.ones(new, new, dtype=torch.bool, device=shown.device).tril()
    for skip, row in zip(padding, shown, strict=True):
        if shown.dim() == 2:
            plain = bool(row[skip:].all())
        else:
            own = row[0, skip:]
            plain = bool((own[:, skip:] == causal[skip:, skip:]).all() and not own[:, :skip].any())
        if not plain:
            return None
    return padding


def require_rows(rows: Rows, seen: int, ids: Tensor | None, states: Sequence[LayerState]) -> None:
    """Compare positions `[B, M]`, where they are handed over, with each row's own.

    Raises:
        ModelError: they count the padding, and the policy or its rule reads positions.
    """
    if all(state.rotary is None for state in states):
        return
    starts = torch.tensor([max(0, seen - skip) for skip in rows.padding])[:, None]
    if ids is not None and ids.dim() == 2 and len(ids) == len(starts):
        last = starts + ids.shape[1] - 1 - (0 if seen else torch.tensor(rows.padding)[:, None])
        if bool((ids[:, -1:].cpu() == last).all()):
            return
    raise ModelError(
        "this policy reads positions, and those of a padded batch must count each row's own "
        "tokens, as generate() has them; give position_ids, or prompts of equal length"
    )


def known(mask: Any) -> list[int] | None:
    """What another layer found in the same mask."""
    found: list[int] | None = getattr(mask, KNOWN, None)
    return found
