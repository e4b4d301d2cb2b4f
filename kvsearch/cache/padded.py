"""Left-padded batches: every row has a layer of its own, and gives what it would give alone.

Padding comes in front of a prompt, in the first call of a batch of unequal prompts. Its tokens are
never taken in: each row's layer sees that row's own tokens, one row after the other, so that any
policy is exact, at the cost of the rows' products.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvsearch.cache.layer import Layer
from kvsearch.cache.ways import advance
from kvsearch.errors import ModelError


@dataclass
class PaddedBatch:
    """One layer of each row of a batch.

    Attributes:
        padding: tokens in front of each row.
        rows: the layer of each, which holds one sequence.
    """

    padding: list[int]
    rows: list[Layer]

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, predicted: Tensor | None, *, scale: float,
        softcap: float | None,
    ) -> Tensor:  # fmt: skip
        """As `advance`, row by row; what padding attends to is 0.

        `predicted` `[B, H, M]` is what the rule's weights predict for all rows and the padding.
        """
        out = q.new_zeros(*q.shape[:3], v.shape[3])
        for i, (skip, layer) in enumerate(zip(self.padding, self.rows, strict=True)):
            first = 0 if layer.seen else skip
            own = (x[i : i + 1, :, first:] for x in (q, k, v))
            layer.predicted = None if predicted is None else predicted[i : i + 1, :, first:]
            out[i : i + 1, :, first:] = advance(layer, *own, scale=scale, softcap=softcap)
        return out

    def reorder(self, rows: Sequence[int]) -> None:
        """Select rows, some of them several times."""
        self.padding = [self.padding[i] for i in rows]
        self.rows = [self.rows[i].copied() for i in rows]

    @property
    def fullest(self) -> Layer:
        """The row that holds most bytes."""
        return max(self.rows, key=lambda layer: layer.nbytes)


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


def require_rows(batch: PaddedBatch, layer: Layer, ids: Tensor | None) -> None:
    """Compare positions `[B, M]`, where they are handed over, with each row's own.

    Raises:
        ModelError: they count the padding, and the policy or its rule reads positions.
    """
    if layer.rotary is None:
        return
    seen, skipped = layer.seen, torch.tensor(batch.padding)[:, None]
    starts = (seen - skipped).clamp_min(0)
    if ids is not None and ids.dim() == 2 and len(ids) == len(starts):
        last = starts + ids.shape[1] - 1 - (0 if seen else skipped)
        if bool((ids[:, -1:].cpu() == last).all()):
            return
    raise ModelError(
        "this policy reads positions, and those of a padded batch must count each row's own "
        "tokens, as generate() has them; give position_ids, or prompts of equal length"
    )
