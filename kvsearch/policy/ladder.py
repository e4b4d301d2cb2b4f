"""The ladder of LaCache (arXiv:2507.14204): which rung of old tokens each layer keeps.

A ladder is `B` consecutive tokens of which every layer keeps `A`, starting at the layer's own
offset; it frees `R = B - A` slots. Neighbouring layers hold neighbouring rungs, so a token
dropped in one layer survives in another.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

Order = Literal["modular", "contiguous"]


@dataclass(frozen=True)
class Rungs:
    """Integers of one ladder: `B` tokens in, `A` kept, `R` freed, `e` layers per step."""

    e: int
    B: int
    A: int

    @property
    def R(self) -> int:
        """Slots freed by one ladder."""
        return self.B - self.A


def _round(x: float) -> int:
    return int(x + 0.5)


@lru_cache(maxsize=4096)
def rungs(layers: int, span: float, overlap: float) -> Rungs:
    """Turn shares into integers.

    Args:
        layers: layers of the model, `L`.
        span: share of the layers in which an old token survives one pass, above 0, below 1.
        overlap: share of the span common to neighbouring rungs, 0 to below 1.
    """
    S = min(layers - 1, max(1, _round(span * layers)))
    O = min(S - 1, _round(overlap * S))  # noqa: E741 - the paper's letter
    e = S - O
    B = 1 + -(-(layers - S) // e)
    A = min(-(-S // e), B - 1)  # at least one slot is freed
    return Rungs(e=e, B=B, A=A)


def offset(layer: int, rung: Rungs, order: Order) -> int:
    """First kept token of the ladder in `layer`, in the order of LaCache's code or of its text."""
    if order == "modular":
        return layer % (rung.R + 1)
    return min(max(layer // rung.e - rung.A + 1, 0), rung.R)
