"""What a runtime can execute of a policy: storage formats, and how it evicts.

From this description follow the verdict on every field, the policy that the runtime really runs
(`project`) and the space that `kvsearch run --target` searches.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kvsearch.policy import ModelShape, Policy, Quantizer, Tier
from kvsearch.rules import Rule
from kvsearch_kernels.codebooks import CODEBOOKS


@dataclass(frozen=True)
class Sizes:
    """Which numbers of tokens a runtime takes: multiples of `step` from `low` on, or `only` some.

    Attributes:
        step: multiples of it.
        low: the least.
        only: the numbers themselves, where they are few.
    """

    step: int = 1
    low: int = 0
    only: tuple[int, ...] = ()

    def fit(self, tokens: int) -> int:
        """The nearest number from `tokens` up; the largest of a few where all are below."""
        if self.only:
            return min((n for n in self.only if n >= tokens), default=max(self.only))
        return max(self.low, -(-tokens // self.step) * self.step)


ANY = Sizes()
ONE = Sizes(only=(1,))


@dataclass(frozen=True)
class Format:
    """One way to store keys and values below 16 bits.

    Attributes:
        word: in the runtime's own words.
        key_bits, value_bits: of a number.
        levels: of `Quantizer`.
        group: numbers that share a scale; None is the whole head.
        rotate: whether a Hadamard rotation comes first.
        value_block: most channels of a value that rotate together; None is as many as of a key.
        divides: number that must divide the head size.
        value_levels: of `Quantizer`; None is as keys.
        whole_power: whether the head size must be a power of two.
        ends: layers at each end of the model that the runtime keeps in 16 bits; at most half.
    """

    word: str
    key_bits: int
    value_bits: int
    levels: str
    group: int | None = None
    rotate: bool = False
    value_block: int | None = None
    divides: int = 1
    value_levels: str | None = None
    whole_power: bool = False
    ends: int = 0

    def fits(self, shape: ModelShape | None) -> bool:
        """Whether heads of this size can be stored so; of an unknown one, where all layers are."""
        if shape is None:
            return not self.ends
        D = shape.head_dim
        return not D % self.divides and not (self.whole_power and D & (D - 1))

    @property
    def scaled(self) -> bool:
        """Whether keys or values have scales."""
        return any(CODEBOOKS[n].numbers for n in (self.levels, self.value_levels or self.levels))

    def tier(self) -> Tier:
        """The tier that a policy has with it."""
        return Tier.model_validate(dict(key_bits=self.key_bits, value_bits=self.value_bits))

    def differences(self, policy: Policy, shape: ModelShape | None) -> int:
        """How many fields of the policy's quantiser it would change."""
        return len(self._changed(policy.quantizer, shape))

    def applied(self, quantizer: Quantizer, shape: ModelShape | None) -> Quantizer:
        """The quantiser with the fields that the format sets, where they make a difference."""
        changed = self._changed(quantizer, shape)
        if "levels" in changed:
            changed.add("value_levels")
        new = {name: getattr(self, name) for name in changed if name != "along"}
        return quantizer.model_copy(update={**new, "along": "channels"})

    def _changed(self, q: Quantizer, shape: ModelShape | None) -> set[str]:
        """Fields of a quantiser whose values mean something else here."""
        pairs: dict[str, tuple[object, object]] = {
            "levels": (q.levels, self.levels),
            "rotate": (q.rotate, self.rotate),
            "along": (q.along, "channels"),
            "value_levels": (q.value_levels or q.levels, self.value_levels or self.levels),
        }
        if self.scaled:
            pairs["group"] = self._whole(q.group, shape), self._whole(self.group, shape)
        if self.rotate:
            pairs["value_block"] = _block(q.value_block, shape), _block(self.value_block, shape)
        return {name for name, (asked, given) in pairs.items() if asked != given}

    @property
    def kind(self) -> tuple[object, ...]:
        """What formats have in common that one policy may hold beside one another."""
        return (
            self.levels, self.value_levels, self.group, self.rotate, self.value_block, self.ends,
        )  # fmt: skip

    @staticmethod
    def _whole(group: int | None, shape: ModelShape | None) -> int | None:
        return group if group or shape is None else shape.head_dim


def _block(block: int | None, shape: ModelShape | None) -> int | None:
    """What a rotation of values mixes; a block of all that it could mix says nothing."""
    if block is None or shape is None or block < (shape.head_dim & -shape.head_dim):
        return block
    return None


@dataclass(frozen=True)
class Ranking:
    """A rule by which a runtime evicts, and sizes that go with it.

    Attributes:
        rule: None is by age.
        sinks, recent_window, interval: instead of those of the eviction.
    """

    rule: Rule | None = None
    sinks: Sizes | None = None
    recent_window: Sizes | None = None
    interval: Sizes | None = None


@dataclass(frozen=True)
class Eviction:
    """How a runtime drops tokens.

    Attributes:
        rankings: how it ranks slots.
        triggers: when it compacts.
        positions: rotary indices that it can give to keys, the usual one first.
        sinks, recent_window, slots: sizes that it takes.
        interval: tokens between compactions: sizes, or a function of slots and sinks.
        budgets: whether layers may have different slots.
        quantised: whether it evicts from a cache below 16 bits too.
        room: tokens that may leave, at least, beside what never does.
        reindexes_quantised: whether `positions` counts then too.
        exact_when_quantised: whether `interval` counts then too. A runtime rounds a token when it
            comes, a policy at the next compaction, so the interval is 1 unless this is set.
    """

    rankings: tuple[Ranking, ...] = (Ranking(),)
    triggers: tuple[str, ...] = ("stream",)
    positions: tuple[str, ...] = ("original",)
    sinks: Sizes = ANY
    recent_window: Sizes = ANY
    slots: Sizes = ANY
    interval: Sizes | Callable[[int, int], int] = ANY
    budgets: bool = False
    quantised: bool = False
    room: int = 0
    reindexes_quantised: bool = False
    exact_when_quantised: bool = False


@dataclass(frozen=True)
class Capability:
    """What a runtime can execute.

    Attributes:
        formats: below 16 bits, the usual ones first.
        layers: which formats layers may have beside one another: `alike`; `exceptions`, some of
            them in 16 bits; `ends`, the first and the last ones another than the middle, keys and
            values apart; `below`, any but 16 bits; or `free`.
        eviction: None keeps every token.
    """

    formats: tuple[Format, ...] = ()
    layers: Literal["alike", "exceptions", "ends", "below", "free"] = "alike"
    eviction: Eviction | None = None

    def nearest(
        self,
        tier: Tier,
        policy: Policy,
        shape: ModelShape | None,
        like: Format | None = None,
        *,
        native: bool = True,
    ) -> Format | None:
        """The format nearest to a tier, or None for 16 bits.

        Fewer bits than asked are the last resort; then as few more as possible; then the quantiser
        that differs least.

        Args:
            tier: what is asked.
            policy: whose quantiser is asked.
            shape: of the model; None if it is not known.
            like: a format whose quantiser it must have.
            native: whether it may be 16 bits.
        """
        asked = (tier.key_bits, tier.value_bits)
        found: Format | None = None
        best = _distance(asked, (16, 16)) if native else (32,)
        for f in self.formats:
            if not f.fits(shape) or (like is not None and f.kind != like.kind):
                continue
            far = (*_distance(asked, (f.key_bits, f.value_bits)), f.differences(policy, shape))
            if far < best:
                found, best = f, far
        return found

    def used(
        self, policy: Policy, tier: Tier | None = None, shape: ModelShape | None = None
    ) -> Format | None:
        """The format of a tier of a projected policy, by default its own; None is 16 bits."""
        return self.nearest(tier or policy.tiers[0], policy, shape)


def _distance(asked: tuple[int, int], given: tuple[int, int]) -> tuple[int, ...]:
    pairs = list(zip(asked, given, strict=True))
    return sum(max(0, a - g) for a, g in pairs), sum(max(0, g - a) for a, g in pairs)
