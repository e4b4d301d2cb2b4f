"""The parts of a policy: tiers, quantiser, ladder, score, layer_budgets, and two reserved ones."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvsearch.policy.ladder import Order

Bits = Literal[16, 8, 4, 3, 2, 1]


class Frozen(BaseModel):
    """Base of the value types: immutable, no unknown fields, no infinities."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


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
        levels: `uniform` min/max steps with scale and zero, or `lloyd`, the Lloyd-Max levels of a
            Gaussian with one scale and no zero.
        fp16_sinks: keep the sinks in 16 bits.
    """

    group: int | None = Field(default=64, gt=0)
    rotate: bool = False
    levels: Literal["uniform", "lloyd"] = "uniform"
    fp16_sinks: bool = False


class Ladder(Frozen):
    """Staggered retention over depth (LaCache); `span` and `overlap` are shares, see `rungs`."""

    span: float = Field(gt=0.0, lt=1.0)
    overlap: float = Field(default=0.0, ge=0.0, lt=1.0)
    order: Order = "modular"


class Score(Frozen):
    """How much attention a key received: sum over query rows of `n^alpha * p / count^beta`.

    `(alpha, beta)` is (0, 0) for H2O, (0, 1) for mean attention, (1, 1) for XMU's correction.

    Attributes:
        alpha: power of the number of keys the query sees; 1 undoes the softmax's dilution.
        beta: power of the number of rows that could vote for the key; 1 undoes its age.
        horizon: rows that count; None is all of them.
        kind: `window` counts exactly the last `horizon` rows before each compaction, `decay`
            weighs them by `(1 - 1/horizon)` per row.
        literal: divide by the key's whole age although only `horizon` rows were counted.
        share: `head` lets every KV head choose its slots, `layer` makes them vote together.
        pool: odd width of smoothing over neighbouring slots (SnapKV); 1 is off.
        pool_kind: `avg` or `max` smoothing.
    """

    alpha: float = Field(default=0.0, ge=0.0, le=2.0)
    beta: float = Field(default=0.0, ge=0.0, le=2.0)
    horizon: int | None = Field(default=None, ge=1)
    kind: Literal["window", "decay"] = "window"
    literal: bool = False
    share: Literal["head", "layer"] = "head"
    pool: int = Field(default=1, ge=1)
    pool_kind: Literal["avg", "max"] = "avg"

    @model_validator(mode="after")
    def _odd_pool(self) -> Self:
        if self.pool % 2 == 0:
            raise ValueError(f"pool must be odd, got {self.pool}")
        return self


class LayerBudgets(Frozen):
    """How the slots are shared out over the layers; the mean over layers stays `Policy.slots`.

    Attributes:
        kind: `uniform`; `pyramid`, linear from shallow to deep (PyramidKV); `sensitivity`, in
            proportion to `weights ** exponent`.
        beta: pyramid steepness: first layer `2 - 1/beta` times the mean, last layer `1/beta`.
        exponent: 0 makes every sensitivity layer_budgets uniform.
        weights: measured sensitivity per layer, any positive unit, one number a layer.
    """

    kind: Literal["uniform", "pyramid", "sensitivity"] = "uniform"
    beta: float = Field(default=20.0, ge=1.0)
    exponent: float = Field(default=0.5, ge=0.0, le=2.0)
    weights: tuple[float, ...] = ()

    @model_validator(mode="after")
    def _weights_belong(self) -> Self:
        if self.kind == "sensitivity" and not self.weights:
            raise ValueError("kind 'sensitivity' needs weights, one a layer")
        if any(w <= 0 for w in self.weights):
            raise ValueError("weights must be above 0")
        return self


class Anchors(Frozen):
    """Reserved: AnLLM's anchor tokens. `check` refuses it until the cache executes it."""

    marks: tuple[str, ...] = (".",)
    close: bool = True
    isolate: bool = True


class Channels(Frozen):
    """Reserved: share of query/key pairs and value/output channels kept (KVPruner)."""

    qk: float = Field(default=1.0, gt=0.0, le=1.0)
    vo: float = Field(default=1.0, gt=0.0, le=1.0)
