"""The policy: one frozen value that says what every layer's KV cache holds and when it changes.

All lengths are tokens and the newest token counts. Every published method is one point of this
type (`kvsearch.policy_space.methods`); a sampler proposes it, the cache executes it, a file
carries it.
"""

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    SerializeAsAny,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from kvsearch.errors import KvsearchError, PolicyError, named, reason
from kvsearch.frozen import Frozen, first_error, has_half, named_once
from kvsearch.policy.anchors import Anchors
from kvsearch.policy.channels import Channels
from kvsearch.policy.key_offset import Offset
from kvsearch.policy.ladder import rungs
from kvsearch.policy.parts import Budgets, HeadTiers, Ladder, Quantizer, Tier, check_tiers
from kvsearch.rules import Attention, Rule, json_schema, read

SCHEMA = "kvsearch.policy/2"
PLAIN = ("slots", "interval", "trigger", "sinks", "positions")  # as they are in the identity

AnyRule = Annotated[
    SerializeAsAny[Rule],
    BeforeValidator(read),
    WithJsonSchema(json_schema(), mode="validation"),
]


class Policy(Frozen):
    """What every KV head of every layer keeps, and when that changes.

    After every `interval` tokens each layer is compacted: it evicts until `slots - interval` tokens
    are left, ranks what stays, and moves it into its tiers. In between, new tokens arrive in 16
    bits. `slots` is therefore a ceiling at every step, headroom included.

    Attributes:
        slots: most tokens a KV head ever holds, mean over heads; None never evicts.
        interval: tokens between compactions; 1 is the papers' token-by-token form.
        trigger: `stream` compacts from the first token on; `prompt` once, after a fully attended
            prompt; `prompt+stream` then and every `interval` tokens; `generation` likewise, but the
            prompt stays and `slots` are those of the tokens after it.
        sinks: first tokens, never evicted (StreamingLLM, arXiv:2309.17453).
        recent_window: newest tokens, never evicted, best-ranked for the tiers.
        budgets: how layers, or KV heads, share the slots.
        ladder: depth-staggered eviction instead of oldest-first.
        rule: how slots are ranked, see `kvsearch.rules`; None ranks by age.
        tiers: precisions, best first; shares add up to 1.
        head_tiers: layers or KV heads with other tiers than these; None if there are none.
        quantizer: how tiers below 16 bits store a token.
        refit: `values` fits the values of the slots that a prompt leaves to what the whole prompt
            would answer (Attention Matching, arXiv:2602.16284), `values+bias` their logits first;
            needs rule `reread`.
        anchors: tokens that stand for the sequence that they end, see `Anchors`.
        channels: what every token keeps of its keys and values, see `Channels`.
        positions: `original` keeps each key's rotary angle; `cache` re-indexes keys by slot, so a
            stream may outgrow the trained context.
        name: label for people; not part of the identity.
        about: measures and origin for people; not part of the identity.
    """

    schema_: Literal["kvsearch.policy/2"] = Field(default="kvsearch.policy/2", alias="schema")
    name: str | None = None
    slots: int | None = Field(default=None, ge=1)
    interval: int = Field(default=1, ge=1)
    trigger: Literal["stream", "prompt", "prompt+stream", "generation"] = "stream"
    sinks: int = Field(default=0, ge=0)
    recent_window: int = Field(default=0, ge=0)
    budgets: Budgets = Budgets()
    ladder: Ladder | None = None
    rule: AnyRule | None = None
    tiers: tuple[Tier, ...] = (Tier(),)
    head_tiers: HeadTiers | None = None
    quantizer: Quantizer = Quantizer()
    refit: Literal["none", "values", "values+bias"] = "none"
    anchors: Anchors | None = None
    channels: Channels = Channels()
    positions: Literal["original", "cache"] = "original"
    about: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for i, tiers in enumerate(self.every_tiers):
            check_tiers(tiers, self.quantizer, f"head_tiers.others.{i - 1}" if i else "tiers")
        if self.budgets.kind == "adakv":
            self._heads_can_share()
        if self.trigger == "generation" and (self.anchors or self.budgets.kind == "adakv"):
            raise ValueError("trigger 'generation' goes with neither anchors nor budgets 'adakv'")
        if self.slots is None and self.ladder is not None:
            raise ValueError("ladder needs slots: without a limit nothing is evicted")
        if self.rule is not None:
            self.rule.check(self.interval, self.trigger)
        if self.offset is not None and self.drops and self.positions == "cache":
            raise ValueError(
                "quantizer.offset: it goes with positions 'original': keys that are turned anew "
                "with their slot have no fixed vector in common"
            )
        if self.refits:
            self._prompt_is_refitted()
        grouped = self.quantizes and self.quantizer.along == "tokens"
        if grouped:
            self._groups_stay_whole()
        if self.anchors is not None:
            self.anchors.check(
                ladder=self.ladder is not None, adaptive=self.budgets.kind == "adakv",
                grouped=grouped, rule=self.scored, sinks=self.sinks,
            )  # fmt: skip
        return self

    def _groups_stay_whole(self) -> None:
        """Tokens that share their scales must enter a tier together, and leave in order."""
        group, where = self.quantizer.group, "quantizer.along 'tokens'"
        if group is None:
            raise ValueError(f"{where} needs quantizer.group, the tokens that share a scale")
        if self.evicts and (self.rule is not None or self.ladder is not None):
            raise ValueError(f"{where} needs eviction by age: no rule and no ladder")
        if self.ranks_tiers or self.trigger != "stream":
            raise ValueError(f"{where} needs one tier and trigger 'stream'")
        if self.evicts and self.sinks and not self.quantizer.fp16_sinks:
            raise ValueError(f"{where} needs quantizer.fp16_sinks where there are sinks")
        parts = {"interval": self.interval}
        if self.quantizer.fp16_recent:
            parts["recent_window"] = self.recent_window
        if self.quantizer.fp16_sinks or self.evicts:
            parts["sinks"] = self.sinks
        for name, tokens in parts.items():
            if tokens % group:
                raise ValueError(f"{where}: {name} {tokens} is no multiple of {group}")

    def _prompt_is_refitted(self) -> None:
        """Values are fitted once, for queries that ask as later ones will, as they are turned."""
        where = f"refit {self.refit!r}"
        if not (self.rereads and self.evicts):
            raise ValueError(
                f"{where} needs trigger 'prompt', slots, and rule 'reread', by whose second "
                "reading the prompt is asked as it will be later"
            )
        if self.positions != "original":
            raise ValueError(
                f"{where} needs positions 'original': keys that are turned anew with their slot "
                "answer otherwise than the prompt's"
            )

    def _heads_can_share(self) -> None:
        """AdaKV compares ranks between heads, and its bytes follow from the slots alone."""
        where = "budgets.kind 'adakv'"
        if self.rule is None or not self.evicts or self.ladder is not None:
            raise ValueError(f"{where} needs slots and a rule, and no ladder")
        if len(self.tiers) > 1 or self.head_tiers is not None:
            raise ValueError(f"{where} needs one tier, the same for all heads")
        foretold = "hidden" in self.rule.needs and self.trigger == "prompt"
        if self.budgets.across == "model" and not (foretold or "rereading" in self.rule.needs):
            raise ValueError(
                "budgets.across 'model' needs rule 'reread', or 'kvzap' with trigger 'prompt': "
                "others go layer by layer"
            )

    def after(self, prompt: int) -> "Policy":
        """What runs after a prompt of so many tokens: with trigger `generation` they are sinks."""
        if self.trigger != "generation":
            return self
        more = {"trigger": "prompt+stream", "sinks": self.sinks + prompt}
        return self.model_copy(update=more | ({"slots": self.slots + prompt} if self.slots else {}))

    # -- what is active ----------------------------------------------------------------------

    @property
    def evicts(self) -> bool:
        """Whether there is a limit beyond which tokens are dropped."""
        return self.slots is not None

    @property
    def drops(self) -> bool:
        """Whether tokens are ever dropped, at the limit or by an anchor."""
        return self.evicts or (self.anchors is not None and self.anchors.close)

    @property
    def after_prompt(self) -> bool:
        """Whether it matters what the first call brings in."""
        protects = self.anchors is not None and self.anchors.protected == "prompt"
        return self.trigger != "stream" or protects

    @property
    def quantizes(self) -> bool:
        """Whether any tier is below 16 bits."""
        return not all(t.native for tiers in self.every_tiers for t in tiers)

    @property
    def offset(self) -> Offset | None:
        """What keys are stored without, if any tier is below 16 bits."""
        return self.quantizer.offset if self.quantizes else None

    @property
    def compacts(self) -> bool:
        """Whether compaction ever changes anything."""
        return self.evicts or self.quantizes

    @property
    def every_tiers(self) -> tuple[tuple[Tier, ...], ...]:
        """All lists of tiers, the policy's own first."""
        return (self.tiers, *(self.head_tiers.others if self.head_tiers is not None else ()))

    @property
    def ranks_tiers(self) -> bool:
        """Whether a slot's tier depends on its rank anywhere."""
        return any(len(tiers) > 1 for tiers in self.every_tiers)

    @property
    def per_head(self) -> bool:
        """Whether KV heads of one layer may differ in slots or tiers."""
        return (self.evicts and self.budgets.per_head) or (
            self.head_tiers is not None and self.head_tiers.per_head
        )

    def alike(self, which: int) -> "Policy":
        """What heads do that use `every_tiers[which]`: a policy in which all heads are alike."""
        budgets = self.budgets if self.budgets.kind == "adakv" else Budgets()
        return self.model_copy(
            update={"tiers": self.every_tiers[which], "head_tiers": None, "budgets": budgets}
        )

    @property
    def active_rule(self) -> Rule | None:
        """The rule, where ranks decide anything: who leaves, or which tier a slot is in."""
        return self.rule if self.evicts or self.ranks_tiers else None

    @property
    def rereads(self) -> bool:
        """Whether the model reads a prompt twice."""
        return self.active_rule is not None and "rereading" in self.active_rule.needs

    @property
    def refits(self) -> bool:
        """Whether values are fitted after a prompt."""
        return self.refit != "none"

    @property
    def scored(self) -> bool:
        """Whether slots are ranked by a rule while running."""
        return self.active_rule is not None

    @property
    def tagged(self) -> bool:
        """Whether a slot's tier depends on ranks, so that each slot carries a tag."""
        return self.scored and self.ranks_tiers

    @property
    def fp16_sinks(self) -> int:
        """Sinks stored in 16 bits while the tiers are below."""
        return self.sinks if self.quantizer.fp16_sinks and self.quantizes else 0

    @property
    def fp16_recent(self) -> int:
        """Tokens of the recent window stored in 16 bits while the tiers are below."""
        return self.recent_window if self.quantizer.fp16_recent and self.quantizes else 0

    @property
    def quantised_on_arrival(self) -> bool:
        """Whether a token's stored value is known when it comes: one tier, its own groups."""
        return not (self.ranks_tiers or self.fp16_recent or self.quantizer.along == "tokens")

    # -- identity ----------------------------------------------------------------------------

    def canonical(self, layers: int | None = None) -> dict[str, Any]:
        """Active fields only; equal dictionaries mean equal behaviour.

        The keys are those of the first schema, so that fingerprints in old records stay true.

        Args:
            layers: layers of the model; given, ladders are compared by their integers.
        """
        d: dict[str, Any] = {name: getattr(self, name) for name in PLAIN}
        d["recents"] = self.recent_window
        many = self.ranks_tiers
        d["tiers"], of = self._canonical_tiers()
        if len(d["tiers"]) > 1:
            d["tiers of"] = of
        else:
            (d["tiers"],) = d["tiers"]
        if self.quantizes:
            d["quantizer"] = self.quantizer.canonical(self.fp16_sinks > 0, self.fp16_recent > 0)
        if (rule := self.active_rule) is not None:
            d["score" if type(rule) is Attention else "rule"] = rule.canonical()
        if self.ladder is not None:
            d["ladder"] = self._canonical_ladder(layers)
        if self.evicts:
            d["spread"] = self._canonical_budgets()
            told = self.scored or self.ladder or many or self.fp16_recent or self.anchors
            if not told and self.budgets.kind == "uniform":  # else no layer has fewer slots
                d["recents"] = 0
        elif not self.drops:
            d["positions"] = "original"
            if not self.fp16_sinks:
                d["sinks"] = 0
            if not many and not self.fp16_recent:
                d["recents"] = 0
        if not self.compacts:
            d["interval"], d["trigger"] = 1, "stream"
            d["sinks"] = self.sinks if self.drops else 0
        if self.refits:
            d["refit"] = self.refit
        if self.anchors is not None:
            d["anchors"] = self.anchors.canonical()
        if self.channels.active:
            d["channels"] = {k: list(v) for k, v in self.channels if any(w != "all" for w in v)}
        return d

    def _canonical_tiers(self) -> tuple[list[Any], list[Any]]:
        """Lists of tiers in the order in which heads first use them, and who uses which."""
        lists = [
            [[round(t.share, 6), t.key_bits, t.value_bits] for t in x] for x in self.every_tiers
        ]
        if self.head_tiers is None:
            return lists, []
        used: list[Any] = []

        def place(which: int) -> int:
            if lists[which] not in used:
                used.append(lists[which])
            return used.index(lists[which])

        of: list[Any] = []
        for row in self.head_tiers.of:
            heads = [place(i) for i in (row if isinstance(row, tuple) else (row,))]
            of.append(heads[0] if len({*heads}) == 1 else heads)
        return used, of

    def _canonical_ladder(self, layers: int | None) -> Any:
        assert self.ladder is not None
        order = "modular" if self.scored else self.ladder.order
        if layers is None:
            return [self.ladder.span, self.ladder.overlap, order]
        r = rungs(layers, self.ladder.span, self.ladder.overlap)
        return [r.B, r.A, order] + ([r.e] if order == "contiguous" else [])

    def _canonical_budgets(self) -> Any:
        b = self.budgets
        if b.kind == "pyramid" and b.beta != 1:
            return ["pyramid", b.beta, *(["rest"] if b.of == "rest" else [])]
        if b.kind == "sensitivity" and b.exponent != 0:
            return ["sensitivity", b.exponent, list(b.weights)]
        if b.kind == "adakv":
            return ["adakv", b.floor, *(["model"] if b.across == "model" else [])]
        return ["uniform"]

    def fingerprint(self, layers: int | None = None) -> str:
        """Sixteen hex digits over the active fields, see `canonical`."""
        text = json.dumps(self.canonical(layers), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    # -- files -------------------------------------------------------------------------------

    def to_json(self) -> str:
        """The policy as indented JSON, defaults left out."""
        d = self.plain()
        text = json.dumps({"schema": SCHEMA, **d}, indent=2)
        flat = re.compile(r"\[[^\[\]{}\"]*\]")  # lists of numbers on one line
        return (
            flat.sub(
                lambda m: re.sub(r"\s+", " ", m[0]).replace("[ ", "[").replace(" ]", "]"), text
            )
            + "\n"
        )

    def plain(self) -> dict[str, Any]:
        """Plain data from which `build` makes the same policy; defaults left out."""
        d = self.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        if self.rule is not None:
            d["rule"] = {"name": self.rule.name, **d.get("rule", {})}
        return d

    @classmethod
    def from_json(cls, source: str | os.PathLike[str]) -> Self:
        """Read a policy file.

        Raises:
            PolicyError: the file is missing, is not JSON, or a field is wrong (its path is named).
        """
        try:
            text = Path(source).read_text(encoding="utf-8")
        except (OSError, ValueError) as e:  # also of a name with a zero byte
            raise PolicyError(f"cannot read policy file {named(source)}: {reason(e)}") from e
        found = cls.parse(text, where=str(source))
        if found.rule is not None:
            found.rule.lies_in(Path(source).parent)
        return found

    @classmethod
    def parse(cls, text: str, where: str = "policy") -> Self:
        """Read a policy from JSON text; `where` names the source in errors."""
        try:
            data = json.loads(text, object_pairs_hook=named_once)
        except KvsearchError as e:
            raise PolicyError(f"{where}: {e}") from e
        except json.JSONDecodeError as e:
            raise PolicyError(f"{where}: not JSON (line {e.lineno}: {e.msg})") from e
        except ValueError as e:  # Python refuses to read numbers of thousands of digits
            raise PolicyError(f"{where}: a number has too many digits for a policy") from e
        except RecursionError as e:
            raise PolicyError(f"{where}: brackets are nested too deeply for a policy") from e
        if "\\u" in text and has_half(json.dumps(data, ensure_ascii=False)):
            raise PolicyError(f"{where}: half of a character (\\ud800 to \\udfff) is no text")
        if not isinstance(data, dict):
            raise PolicyError(f"{where}: expected one JSON object, got {type(data).__name__}")
        return cls.build(data, where=where)

    @classmethod
    def build(cls, data: dict[str, Any], where: str = "policy") -> Self:
        """Build a policy from plain data; a wrong field raises a `PolicyError` with its path."""
        try:
            return cls.model_validate(data)
        except ValidationError as e:
            raise PolicyError(f"{where}: {first_error(e)}") from e
        except RecursionError as e:
            raise PolicyError(f"{where}: brackets are nested too deeply for a policy") from e


def attention(policy: Policy) -> Attention | None:
    """The active rule, if it is a sum of attention."""
    rule = policy.active_rule
    return rule if isinstance(rule, Attention) else None


# `adapted` and `channels` are what `kvsearch adapt` and `prune` did to the model
KEPT = ("model", "adapted", "channels")


def without_figures(policy: Policy) -> Policy:
    """The policy without the figures in its `about`, which were measured on something else.

    Everything goes that is not known to speak of the origin: anybody may write figures there,
    under any name.
    """
    about = {name: policy.about[name] for name in KEPT if name in policy.about}
    return policy if about == policy.about else policy.model_copy(update={"about": about})
