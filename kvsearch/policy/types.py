"""The policy: one frozen value that says what every layer's KV cache holds and when it changes.

All lengths are tokens and the newest token counts. Every published method is one point of this
type (`kvsearch.methods`); a sampler proposes it, the cache executes it, a file carries it.
"""

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, ValidationError, model_validator

from kvsearch.errors import PolicyError
from kvsearch.policy.ladder import rungs
from kvsearch.policy.parts import (
    Anchors,
    Channels,
    Frozen,
    Ladder,
    Quantizer,
    Score,
    LayerBudgets,
    Tier,
)
from kvsearch.policy.shape import ModelShape

SCHEMA = "kvsearch.policy/1"

# Fields that `canonical` writes in its own way, or that are no part of the identity.
APART = {
    "schema_", "name", "about", "layer_budgets", "ladder", "score", "quantizer", "anchors", "channels",
    "tiers",
}  # fmt: skip


class Policy(Frozen):
    """What every KV head of every layer keeps, and when that changes.

    After every `interval` tokens ("a compaction") each layer evicts until `slots - interval` tokens are
    left, ranks what stays, and moves it into its tiers. In between, new tokens arrive in 16 bits.
    `slots` is therefore a ceiling at every step, headroom included.

    Attributes:
        slots: most tokens a layer ever holds, mean over layers; None never evicts.
        interval: tokens between compactions; 1 is the papers' token-by-token form.
        trigger: `stream` compactions from the first token on; `prompt` compactions once, after a fully attended
            prompt; `prompt+stream` compactions then and every `interval` tokens.
        sinks: first tokens, never evicted (StreamingLLM, arXiv:2309.17453).
        recent_window: newest tokens, never evicted, best-ranked for the tiers.
        layer_budgets: per-layer share of the slots.
        ladder: depth-staggered eviction instead of oldest-first.
        score: rank by attention received; None ranks by age.
        tiers: precisions, best first; shares add up to 1.
        quantizer: how tiers below 16 bits store a token.
        anchors: reserved.
        channels: reserved.
        positions: `original` keeps each key's rotary angle; `cache` re-indexes keys by slot, so a
            stream may outgrow the trained context.
        name: label for people; not part of the identity.
        about: measures and origin for people; not part of the identity.
    """

    schema_: Literal["kvsearch.policy/1"] = Field(default="kvsearch.policy/1", alias="schema")
    name: str | None = None
    slots: int | None = Field(default=None, ge=1)
    interval: int = Field(default=1, ge=1)
    trigger: Literal["stream", "prompt", "prompt+stream"] = "stream"
    sinks: int = Field(default=0, ge=0)
    recent_window: int = Field(default=0, ge=0)
    layer_budgets: LayerBudgets = LayerBudgets()
    ladder: Ladder | None = None
    score: Score | None = None
    tiers: tuple[Tier, ...] = (Tier(),)
    quantizer: Quantizer = Quantizer()
    anchors: Anchors | None = None
    channels: Channels = Channels()
    positions: Literal["original", "cache"] = "original"
    about: dict[str, Any] = Field(default_factory=dict)

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, populate_by_name=True
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        total = sum(t.share for t in self.tiers)
        if not self.tiers or abs(total - 1.0) > 1e-6:
            raise ValueError(f"tiers: shares must add up to 1, got {total:g}")
        for above, below in zip(self.tiers, self.tiers[1:], strict=False):
            if below.key_bits > above.key_bits or below.value_bits > above.value_bits:
                raise ValueError("tiers: bits must not rise from a better tier to a worse one")
        if self.slots is None and self.ladder is not None:
            raise ValueError("ladder needs slots: without a limit nothing is evicted")
        s = self.score
        if s is not None and s.kind == "window" and s.horizon is not None:
            if s.horizon > self.interval and s.horizon % self.interval:
                raise ValueError(
                    f"score.horizon {s.horizon} must be at most interval {self.interval} "
                    "or a multiple of it"
                )
            if s.horizon > self.interval and self.trigger != "stream":
                raise ValueError("score.horizon must be at most interval when a prompt triggers")
        return self

    # -- what is active ----------------------------------------------------------------------

    @property
    def evicts(self) -> bool:
        """Whether tokens are ever dropped."""
        return self.slots is not None

    @property
    def quantizes(self) -> bool:
        """Whether any tier is below 16 bits."""
        return not all(t.native for t in self.tiers)

    @property
    def compacts(self) -> bool:
        """Whether compaction ever changes anything."""
        return self.evicts or self.quantizes

    @property
    def scored(self) -> bool:
        """Whether attention weights are needed while running."""
        return self.score is not None and (self.evicts or len(self.tiers) > 1)

    @property
    def tagged(self) -> bool:
        """Whether a slot's tier depends on scores, so that each slot carries a tag."""
        return self.scored and len(self.tiers) > 1

    @property
    def fp16_sinks(self) -> int:
        """Sinks stored in 16 bits while the tiers are below."""
        return self.sinks if self.quantizer.fp16_sinks and self.quantizes else 0

    @property
    def score_blocks(self) -> int:
        """Partial sums kept per slot: more than 1 when a window spans several intervals."""
        s = self.score
        if not self.scored or s is None or s.kind == "decay" or s.horizon is None:
            return 1
        return max(1, s.horizon // self.interval)

    @property
    def needs_age(self) -> bool:
        """Whether each slot must remember when its token came."""
        return self.scored and self.score is not None and self.score.beta != 0

    def canonical(self, layers: int | None = None) -> dict[str, Any]:
        """Active fields only; equal dictionaries mean equal behaviour.

        Args:
            layers: layers of the model; given, ladders are compared by their integers.
        """
        names = [name for name in Policy.model_fields if name not in APART]
        d: dict[str, Any] = {name: getattr(self, name) for name in names}
        many = len(self.tiers) > 1
        d["tiers"] = [[round(t.share, 6), t.key_bits, t.value_bits] for t in self.tiers]
        if self.quantizes:
            q = self.quantizer.model_dump()
            q["fp16_sinks"] = self.fp16_sinks > 0
            d["quantizer"] = q
        if self.scored and self.score is not None:
            s = self.score.model_dump()
            if s["horizon"] is None or s["beta"] == 0:
                s["literal"] = False
            if s["horizon"] is None:
                s["kind"] = "window"
            if s["pool"] == 1:
                s["pool_kind"] = "avg"
            d["score"] = s
        if self.ladder is not None:
            d["ladder"] = self._canonical_ladder(layers)
        if self.evicts:
            d["layer_budgets"] = self._canonical_layer_budgets()
            if not (self.scored or self.ladder or many):
                d["recent_window"] = 0
        else:
            d["positions"] = "original"
            if not self.fp16_sinks:
                d["sinks"] = 0
            if not many:
                d["recent_window"] = 0
        if not self.compacts:
            d["interval"], d["trigger"], d["sinks"] = 1, "stream", 0
        if self.anchors is not None:
            d["anchors"] = self.anchors.model_dump()
        if self.channels != Channels():
            d["channels"] = self.channels.model_dump()
        return d

    def _canonical_ladder(self, layers: int | None) -> Any:
        assert self.ladder is not None
        order = "modular" if self.scored else self.ladder.order
        if layers is None:
            return [self.ladder.span, self.ladder.overlap, order]
        r = rungs(layers, self.ladder.span, self.ladder.overlap)
        return [r.B, r.A, order] + ([r.e] if order == "contiguous" else [])

    def _canonical_layer_budgets(self) -> Any:
        s = self.layer_budgets
        if s.kind == "pyramid" and s.beta != 1:
            return ["pyramid", s.beta]
        if s.kind == "sensitivity" and s.exponent != 0:
            return ["sensitivity", s.exponent, list(s.weights)]
        return ["uniform"]

    def fingerprint(self, layers: int | None = None) -> str:
        """Sixteen hex digits over the active fields, see `canonical`."""
        text = json.dumps(self.canonical(layers), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    # -- files -------------------------------------------------------------------------------

    def to_json(self) -> str:
        """The policy as indented JSON, defaults left out."""
        d = self.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        text = json.dumps({"schema": SCHEMA, **d}, indent=2)
        flat = re.compile(r"\[[^\[\]{}\"]*\]")  # lists of numbers on one line
        return (
            flat.sub(
                lambda m: re.sub(r"\s+", " ", m[0]).replace("[ ", "[").replace(" ]", "]"), text
            )
            + "\n"
        )

    @classmethod
    def from_json(cls, source: str | os.PathLike[str]) -> Self:
        """Read a policy file.

        Raises:
            PolicyError: the file is missing, is not JSON, or a field is wrong (its path is named).
        """
        try:
            text = Path(source).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise PolicyError(f"cannot read policy file {source}: {e}") from e
        return cls.parse(text, where=str(source))

    @classmethod
    def parse(cls, text: str, where: str = "policy") -> Self:
        """Read a policy from JSON text; `where` names the source in errors."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as e:
            raise PolicyError(f"{where}: not JSON (line {e.lineno}: {e.msg})") from e
        if not isinstance(data, dict):
            raise PolicyError(f"{where}: expected one JSON object, got {type(data).__name__}")
        return cls.build(data, where=where)

    @classmethod
    def build(cls, data: dict[str, Any], where: str = "policy") -> Self:
        """Build a policy from plain data; a wrong field raises a `PolicyError` with its path."""
        try:
            return cls.model_validate(data)
        except ValidationError as e:
            first = e.errors()[0]
            path = ".".join(str(p) for p in first["loc"]) or "policy"
            given = first.get("input")
            shown = "" if isinstance(given, dict | list) else f", got {given!r}"
            message = first["msg"].removeprefix("Value error, ")
            raise PolicyError(f"{where}: field {path}: {message}{shown}") from e

    # -- against a model ---------------------------------------------------------------------

    def check(self, shape: ModelShape) -> None:
        """Raise a `PolicyError` that says why a model of this shape cannot run the policy."""
        from kvsearch.policy.layout import layout  # the layout is computed from this type

        if self.anchors is not None:
            raise PolicyError("field anchors: this version does not execute anchors yet")
        if self.channels != Channels():
            raise PolicyError("field channels: this version does not execute channel pruning yet")
        if self.quantizes:
            group = self.quantizer.group or shape.head_dim
            if shape.head_dim % group:
                raise PolicyError(
                    f"field quantizer.group: {group} does not divide the head size {shape.head_dim}"
                )
            low = min(b for t in self.tiers for b in (t.key_bits, t.value_bits))
            if shape.head_dim % 8 and low < 8:
                raise PolicyError(
                    f"field tiers: head size {shape.head_dim} is no multiple of 8, so {low} bits "
                    "cannot be packed"
                )
        if self.layer_budgets.kind == "sensitivity" and len(self.layer_budgets.weights) != shape.layers:
            raise PolicyError(
                f"field layer_budgets.weights: {len(self.layer_budgets.weights)} weights for a model with "
                f"{shape.layers} layers; the policy was made for another shape"
            )
        if self.ladder is not None and shape.layers < 2:
            raise PolicyError("field ladder: a ladder needs at least 2 layers")
        layout(self, shape)
