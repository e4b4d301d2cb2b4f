"""The parts of a policy: tiers, quantiser, ladder and budgets."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from kvsearch.errors import nearest
from kvsearch.frozen import Frozen
from kvsearch.policy.key_offset import Offset
from kvsearch.policy.ladder import Order
from kvsearch_kernels.codebooks import CODEBOOKS, Codebook

Bits = Literal[16, 8, 5, 4, 3, 2, 1]


def _known(levels: str) -> str:
    if levels not in CODEBOOKS:
        raise ValueError(f"unknown levels{nearest(levels, CODEBOOKS)}")
    return levels


def _power_of_two(block: int) -> int:
    if block & (block - 1):
        raise ValueError("must be a power of two")
    return block


Block = Annotated[int, Field(ge=1), AfterValidator(_power_of_two)]
Weights = tuple[float, ...] | tuple[tuple[float, ...], ...]
LEAST = 1e-100  # of weights, whose power is at most 2
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
        rotate: Hadamard rotation of each head before quantising (QuaRot, arXiv:2404.00456), over
            the largest power of two that divides the head size.
        value_block: most channels of a value that one rotation mixes (llama.cpp: 64); None mixes
            as many as of a key, and 1 rotates keys only.
        levels: a key of `kvsearch_kernels.codebooks.CODEBOOKS`: `uniform` min/max steps with scale
            and zero; `lloyd`, the Lloyd-Max levels of a Gaussian with one scale and no zero; `e4m3`
            and `e5m2`, 8-bit floating point without a scale; `ggml-0` and `ggml-1`, the blocks of
            llama.cpp's q8_0, q5_0, q4_0 and of its q5_1, q4_1; `vllm-int`, `vllm-fp8`,
            `turboquant-k`, `turboquant-v` and `nvfp4`, formats of vLLM.
        value_levels: the same for values, where they differ from keys.
        along: what a group of keys lies along: the `channels` of one token, or one channel of
            `group` neighbouring `tokens` (KIVI, arXiv:2402.02750). Values are always per token.
        fp16_sinks: keep the sinks in 16 bits.
        fp16_recent: keep the recent window in 16 bits.
        offset: a vector of each KV head that its keys are stored without, see `Offset`.
    """

    group: int | None = Field(default=64, gt=0)
    rotate: bool = False
    value_block: Block | None = None
    levels: Levels = "uniform"
    value_levels: Levels | None = None
    along: Literal["channels", "tokens"] = "channels"
    fp16_sinks: bool = False
    fp16_recent: bool = False
    offset: Offset | None = None

    @property
    def books(self) -> tuple[Codebook, Codebook]:
        """Codebooks of keys and of values."""
        return CODEBOOKS[self.levels], CODEBOOKS[self.value_levels or self.levels]

    @property
    def scaled(self) -> bool:
        """Whether keys or values have scales, so that groups count."""
        return any(book.numbers for book in self.books)

    def canonical(self, sinks: bool, recent: bool) -> dict[str, Any]:
        """Fields that matter, for `Policy.canonical`; the flags say what stays in 16 bits."""
        d = dict(self.model_dump(exclude={"offset"}), fp16_sinks=sinks)
        if self.offset is not None:
            d["offset"] = self.offset.digest
        if not recent:
            del d["fp16_recent"]
        if self.along == "channels":
            del d["along"]
        if not self.rotate or self.value_block is None:
            del d["value_block"]
        if self.value_levels in (None, self.levels):
            del d["value_levels"]
        if not self.scaled:
            d["group"] = None
        return d


class Ladder(Frozen):
    """Staggered retention over depth (LaCache); `span` and `overlap` are shares, see `rungs`."""

    span: float = Field(gt=0.0, lt=1.0)
    overlap: float = Field(default=0.0, ge=0.0, lt=1.0)
    order: Order = "modular"


class Budgets(Frozen):
    """How the slots are shared out over layers, or over KV heads; their mean is `Policy.slots`.

    Attributes:
        kind: `uniform`; `pyramid`, linear from shallow to deep (PyramidKV); `sensitivity`, in
            proportion to `weights ** exponent`; `adakv`, where the heads of a layer share its
            budget anew at every compaction, by where the best-ranked slots are (AdaKV,
            arXiv:2407.11550).
        beta: pyramid steepness: first layer `2 - 1/beta` times the mean, last layer `1/beta`.
        of: what the pyramid shares out: the `total`, or as published the `rest` after every layer
            has what it never evicts and its headroom.
        exponent: power of the weights; 0 makes them all alike.
        weights: measured sensitivity, any positive unit: one number a layer, or per layer one
            number a KV head.
        floor: share of an even budget that AdaKV leaves to every head.
        across: whose heads share under `adakv`: those of a `layer`, or of the whole `model`, which
            needs a rule by which the prompt is read again (KVzip, arXiv:2505.23416), or whose score
            predicts that.
    """

    kind: Literal["uniform", "pyramid", "sensitivity", "adakv"] = "uniform"
    beta: float = Field(default=20.0, ge=1.0)
    of: Literal["total", "rest"] = "total"
    exponent: float = Field(default=0.5, ge=0.0, le=2.0)
    weights: Weights = ()
    floor: float = Field(default=0.2, ge=0.0, le=1.0)
    across: Literal["layer", "model"] = "layer"

    @model_validator(mode="after")
    def _weights_belong(self) -> Self:
        if self.kind == "sensitivity" and not self.weights:
            raise ValueError("kind 'sensitivity' needs weights, one a layer or one a head")
        if self.of == "rest" and self.kind != "pyramid":
            raise ValueError("of 'rest' goes with kind 'pyramid'")
        if self.across == "model" and self.kind != "adakv":
            raise ValueError("across 'model' goes with kind 'adakv'")
        for row in self.weights:
            each = row if isinstance(row, tuple) else (row,)
            if min(each, default=0.0) <= 0:
                raise ValueError("weights must be above 0")
            if not LEAST <= min(each) <= max(each) <= 1 / LEAST:  # else powers and sums end
                raise ValueError(f"weights must be between {LEAST:g} and {1 / LEAST:g}")
        return self

    @property
    def per_head(self) -> bool:
        """Whether heads of one layer may have different budgets."""
        if self.kind == "adakv":
            return True
        return self.kind == "sensitivity" and isinstance(self.weights[0], tuple)


class HeadTiers(Frozen):
    """Tiers that differ over layers or KV heads: bits per layer, bits per head.

    Attributes:
        others: lists of tiers beside the policy's own.
        of: which list each layer uses, or per layer each of its KV heads: 0 is `Policy.tiers`, `i`
            is `others[i - 1]`.
    """

    others: tuple[tuple[Tier, ...], ...] = Field(min_length=1)
    of: tuple[int, ...] | tuple[tuple[int, ...], ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _indices_fit(self) -> Self:
        for row in self.of:
            if row == ():
                raise ValueError("of: a layer names no list of tiers for its heads")
            for i in row if isinstance(row, tuple) else (row,):
                if not 0 <= i <= len(self.others):
                    raise ValueError(f"of: {i} is not one of 0 to {len(self.others)}")
        return self

    @property
    def per_head(self) -> bool:
        """Whether heads of one layer may have different tiers."""
        return isinstance(self.of[0], tuple)


def check_tiers(tiers: Sequence[Tier], quantizer: Quantizer, where: str = "tiers") -> None:
    """Raise a `ValueError` that starts with the path of the wrong field.

    Args:
        tiers: precisions, best first.
        quantizer: how those below 16 bits are stored.
        where: path of the tiers.
    """
    total = sum(t.share for t in tiers)
    if not tiers or abs(total - 1.0) > 1e-6:
        raise ValueError(f"{where}: shares must add up to 1, got {total:g}")
    for above, below in pairwise(tiers):
        if below.key_bits > above.key_bits or below.value_bits > above.value_bits:
            raise ValueError(f"{where}: bits must not rise from a better tier to a worse one")
    words = [f"levels {quantizer.levels!r}"] * 2
    if quantizer.value_levels is not None:
        words[1] = f"value_levels {quantizer.value_levels!r}"
    sides = list(zip(("key_bits", "value_bits"), words, quantizer.books, strict=True))
    for i, tier in enumerate(tiers):
        for name, levels, book in sides:
            bits = getattr(tier, name)
            if bits not in (16, *book.bits):
                known = ", ".join(map(str, book.bits))
                raise ValueError(f"{where}.{i}.{name}: {levels} know {known} bits, got {bits}")
    if all(t.native for t in tiers):
        return
    if quantizer.along == "tokens" and not quantizer.books[0].columns:
        raise ValueError(f"quantizer.along: {words[0]} have no groups along tokens")
    for _, levels, book in sides:
        if book.group is not None and quantizer.group != book.group:
            got = quantizer.group or "the whole head"
            raise ValueError(f"quantizer.group: {levels} have groups of {book.group}, got {got}")
