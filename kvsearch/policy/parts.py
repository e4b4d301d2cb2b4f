"""The parts of a policy: tiers, quantiser, ladder, layer budgets, and a reserved one."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from kvsearch.errors import nearest
from kvsearch.frozen import Frozen
from kvsearch.policy.ladder import Order
from kvsearch_kernels.codebooks import CODEBOOKS

Bits = Literal[16, 8, 4, 3, 2, 1]


def _known(levels: str) -> str:
    if levels not in CODEBOOKS:
        raise ValueError(f"unknown levels{nearest(levels, CODEBOOKS)}")
    return levels


Levels = Annotated[str, AfterValidator(_known), Field(json_schema_extra={"enum": [*CODEBOOKS]})]


class Tier(Frozen):
    """One precision: the best-ranked `share` of the resident tokens not yet in a tier above."""

    share: float = Field(default=1.0, gt=0.0, le=1.0)
    key_bits: Bits = 16
    value_bits: Bits = 16

    @property
    def native(self) -> bool:
        """Whether keys and values stay in 16 bits."""
        return self.key_bits == 16 and self.value_bits == 16


class Quantizer(Frozen):
    """How a tier below 16 bits stores one token's head.

    Attributes:
        group: channels that share one scale; None is the whole head. A divisor of the head size.
        rotate: Hadamard rotation of each head before quantising (QuaRot, arXiv:2404.00456).
        levels: a key of `kvsearch_kernels.codebooks.CODEBOOKS`: `uniform` min/max steps with scale
            and zero, or `lloyd`, the Lloyd-Max levels of a Gaussian with one scale and no zero.
        along: what a group of keys lies along: the `channels` of one token, or one channel of
            `group` neighbouring `tokens` (KIVI, arXiv:2402.02750). Values are always per token.
        fp16_sinks: keep the sinks in 16 bits.
        fp16_recent: keep the recent window in 16 bits.
    """

    group: int | None = Field(default=64, gt=0)
    rotate: bool = False
    levels: Levels = "uniform"
    along: Literal["channels", "tokens"] = "channels"
    fp16_sinks: bool = False
    fp16_recent: bool = False


class Ladder(Frozen):
    """Staggered retention over depth (LaCache); `span` and `overlap` are shares, see `rungs`."""

    span: float = Field(gt=0.0, lt=1.0)
    overlap: float = Field(default=0.0, ge=0.0, lt=1.0)
    order: Order = "modular"


class Budgets(Frozen):
    """How the slots are shared out over the layers; the mean over layers stays `Policy.slots`.

    Attributes:
        kind: `uniform`; `pyramid`, linear from shallow to deep (PyramidKV); `sensitivity`, in
            proportion to `weights ** exponent`.
        beta: pyramid steepness: first layer `2 - 1/beta` times the mean, last layer `1/beta`.
        of: what the pyramid shares out: the `total`, or as published the `rest` after every layer
            has what it never evicts and its headroom.
        exponent: power of the weights; 0 makes them all alike.
        weights: measured sensitivity per layer, any positive unit, one number a layer.
    """

    kind: Literal["uniform", "pyramid", "sensitivity"] = "uniform"
    beta: float = Field(default=20.0, ge=1.0)
    of: Literal["total", "rest"] = "total"
    exponent: float = Field(default=0.5, ge=0.0, le=2.0)
    weights: tuple[float, ...] = ()

    @model_validator(mode="after")
    def _weights_belong(self) -> Self:
        if self.kind == "sensitivity" and not self.weights:
            raise ValueError("kind 'sensitivity' needs weights, one a layer")
        if self.of == "rest" and self.kind != "pyramid":
            raise ValueError("of 'rest' goes with kind 'pyramid'")
        if any(w <= 0 for w in self.weights):
            raise ValueError("weights must be above 0")
        return self


class Anchors(Frozen):
    """Reserved: AnLLM's anchor tokens. `check` refuses it until the cache executes it."""

    marks: tuple[str, ...] = (".",)
    close: bool = True
    isolate: bool = True
