"""What one call of attention brings."""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Call:
    """Tokens that a call of attention brings to a layer, or to some of its heads.

    Attributes:
        q: queries of the new tokens `[B, Hq, M, D]`.
        k: their keys `[B, H, M, D]`.
        v: their values `[B, H, M, Dv]`.
        scale: factor on the dot products.
        softcap: bound of the scaled products, if the model has one.
        seen: tokens of the stream before them.
        predicted: scores that the rule's weights predict for them `[B, H, M]` fp32, if it has such.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    softcap: float | None = None
    seen: int = 0
    predicted: Tensor | None = None

    @property
    def count(self) -> int:
        """How many tokens there are."""
        return self.q.shape[2]

    @property
    def end(self) -> int:
        """Tokens of the stream once these are taken in."""
        return self.seen + self.count

    @property
    def how(self) -> dict[str, Any]:
        """What an op is told of the products."""
        return {"scale": self.scale, "softcap": self.softcap}

    def tokens(self, part: slice) -> "Call":
        """Some of the tokens."""
        q, k, v = (x[:, :, part] for x in (self.q, self.k, self.v))
        foretold = None if self.predicted is None else self.predicted[..., part]
        return replace(self, q=q, k=k, v=v, seen=self.seen + (part.start or 0), predicted=foretold)

    def row(self, i: int, seen: int) -> "Call":
        """One sequence of several, which had so many tokens before."""
        q, k, v = (x[i : i + 1] for x in (self.q, self.k, self.v))
        return Call(q, k, v, self.scale, self.softcap, seen)

    def queries(self, heads: range) -> slice:
        """Query heads of some KV heads."""
        group = self.q.shape[1] // self.k.shape[1]
        return slice(heads.start * group, heads.stop * group)

    def heads(self, heads: range) -> "Call":
        """The part of some KV heads."""
        if len(heads) == self.k.shape[1]:
            return self
        mine = slice(heads.start, heads.stop)
        q, k, v = self.q[:, self.queries(heads)], self.k[:, mine], self.v[:, mine]
        foretold = None if self.predicted is None else self.predicted[:, mine]
        return replace(self, q=q, k=k, v=v, predicted=foretold)

    def room(self) -> Tensor:
        """Memory for the output `[B, Hq, M, Dv]`."""
        return self.q.new_empty(*self.q.shape[:3], self.v.shape[3])
