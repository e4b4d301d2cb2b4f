"""A policy's channels as a view of the whole model: what is removed is never stored.

The model turns its queries and keys before a cache sees them. A rotary pair turns by itself, so
losing it afterwards is losing it from the weights. What values lose is zero in the output, which
the projection then multiplies by the rows of weights that surgery would take out.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvsearch.cache.model.rotary import Rotary
from kvsearch.errors import ModelError
from kvsearch.policy import ModelShape, Policy


class View:
    """What one layer loses.

    Attributes:
        pairs: kept rotary pairs of each KV head `[H, K / 2]`, or None for all.
        keys: kept channels of queries and keys `[H, K]`: first halves of pairs, then second halves.
        values: kept value channels `[H, V]`, or None for all.
        removed: whether the layer has no attention: it stores nothing and its output is zero.
    """

    def __init__(self, policy: Policy, layer: int, head_dim: int) -> None:
        channels = policy.channels
        self.removed = channels.removed(layer)
        self.pairs = self.keys = self.values = None
        if self.removed:
            return
        if (pairs := channels.pairs(layer)) is not None:
            self.pairs = torch.tensor(pairs, device="cpu")
            self.keys = torch.cat([self.pairs, self.pairs + head_dim // 2], -1)
        if (values := channels.values(layer)) is not None:
            self.values = torch.tensor(values, device="cpu")

    def _to(self, device: torch.device) -> None:
        """Hold indices where the layer is: the host waits for a copy, so there is one."""
        if self.keys is not None and self.keys.device != device:
            self.keys = self.keys.to(device)
        if self.values is not None and self.values.device != device:
            self.values = self.values.to(device)

    def rotary(self, whole: Rotary | None, heads: range) -> Rotary | None:
        """The rotation of what is left of the keys of `heads`, which may differ between them."""
        if whole is None or self.pairs is None or not bool(whole.inv_freq.any()):
            return whole
        mine = self.pairs[heads.start : heads.stop]
        return Rotary(whole.inv_freq[mine.to(whole.inv_freq.device)])

    def kept(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What is left of the model's own queries, keys and values `[B, Hq or H, M, D]`."""
        self._to(q.device)
        if self.keys is not None:
            q, k = q.gather(-1, _each(self.keys, q)), k.gather(-1, _each(self.keys, k))
        if self.values is not None:
            v = v.gather(-1, _each(self.values, v))
        return q, k, v

    def kept_keys(self, k: Tensor) -> Tensor:
        """What is left of the model's own keys `[B, H, M, D]`."""
        self._to(k.device)
        return k if self.keys is None else k.gather(-1, _each(self.keys, k))

    def whole(self, out: Tensor, width: int) -> Tensor:
        """Output `[B, Hq, M, width]`, with zeros where values were lost."""
        if self.values is None:
            return out
        return out.new_zeros(*out.shape[:3], width).scatter_(-1, _each(self.values, out), out)


def views(
    policy: Policy, shape: ModelShape, turned: Callable[[str, str], Sequence[Tensor]]
) -> list[View | None]:
    """The view of every layer; None of a layer that keeps everything.

    Args:
        policy: what runs.
        shape: of the model.
        turned: finds the angles per position of each layer's pairs, zeros where a layer turns
            nothing; given what needs them, and what to do instead.

    Raises:
        ModelError: keys would lose pairs, and the model does not turn whole heads as pairs.
    """
    if not policy.channels.active:
        return [None] * shape.layers
    found = [View(policy, i, shape.head_dim) for i in range(shape.layers)]
    if any(view.pairs is not None for view in found):
        instead = "keep all channels of queries and keys"
        for inv_freq in turned("field channels.qk", instead):
            if inv_freq.any() and 2 * inv_freq.shape[0] != shape.head_dim:
                raise ModelError(
                    f"field channels.qk needs heads that turn as a whole, and this model turns "
                    f"{2 * inv_freq.shape[0]} of {shape.head_dim} channels; {instead}"
                )
    return [
        view if view.removed or view.keys is not None or view.values is not None else None
        for view in found
    ]


def _each(index: Tensor, x: Tensor) -> Tensor:
    """Channels `[H, n]` of KV heads as an index into every head and token of `x` `[.., M, D]`."""
    B, heads, M = x.shape[:3]
    index = index.repeat_interleave(heads // index.shape[0], 0)
    return index.view(1, heads, 1, -1).expand(B, heads, M, -1)
