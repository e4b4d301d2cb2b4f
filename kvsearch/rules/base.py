"""What a retention rule is: a description without torch, and a scorer that runs it.

A rule ranks the slots of a layer; the policy says how many stay and when. The description says what
the rule reads, what it holds per slot and per layer in bytes, how a search reaches it, and its
words for people. Its scorer sees every segment of the stream and ranks the slots at a compaction.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import model_validator

from kvsearch.errors import quoted
from kvsearch.frozen import Frozen

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kvsearch.rules.running import RunningSums

Need = Literal["attention", "rows", "queries", "keys", "values", "outputs", "rereading", "hidden"]


@dataclass(frozen=True)
class Place:
    """Where a scorer works: the integers of one layer, and its device.

    Attributes:
        heads, kv_heads, head_dim: of the layer, `Hq`, `H` and `D`.
        interval: tokens between compactions.
        batch: sequences, `B`.
        device: of every tensor that the scorer holds.
        inv_freq: angle per position of each channel pair `[R / 2]`, for rules that read queries.
        layer: its number, shallow to deep.
        first_head: the first of its KV heads that the scorer works on, all in a row.
        output: L1 norms `[B, H, N]` fp32 of what values `[B, H, N, D]` of these heads become in
            the layer's output; only for rules that need `outputs`.
    """

    heads: int
    kv_heads: int
    head_dim: int
    interval: int
    batch: int
    device: "torch.device"
    inv_freq: "Tensor | None" = None
    layer: int = 0
    first_head: int = 0
    output: "Callable[[Tensor], Tensor] | None" = None


@dataclass(frozen=True)
class Segment:
    """New tokens that a layer has just attended from; what a scorer may observe.

    Attributes:
        seen: tokens of the stream before the segment.
        count: new tokens, `M`.
        received: attention that each held slot received from the segment's queries, weighted by
            `Scorer.row_weights`, `[B, H, N]`; only for rules that need `attention`. It is the
            scorer's own, to keep or write to.
        rows: what slots received from each of the newest queries, in time, `[B, H, G, R, N]` fp32;
            0 where a query does not see a slot. `R` is what `Scorer.watched` asks for, at most `M`;
            only for rules that need `rows`.
        queries: without their rotation `[B, Hq, M, D]`; only for rules that need `queries`.
        predicted: what weights of the rule make of the layer's input, `[B, H, M]` fp32; only for
            rules that need `hidden`.
    """

    seen: int
    count: int
    received: "Tensor | None" = None
    queries: "Tensor | None" = None
    rows: "Tensor | None" = None
    predicted: "Tensor | None" = None


@dataclass(frozen=True)
class Slots:
    """What a layer holds at a compaction; keys and values are read only when asked for.

    Attributes:
        seen: tokens of the stream so far.
        count: slots, `N`, in order of time.
        position: rotary index of the next query.
        recent_from: slots from here on are the recent window, which is never evicted.
        read: keys and values `[B, H, N, D]` as attention sees them (rounded, keys rotated).
        sinks: first slots, which are never evicted.
        stay: slots that this compaction leaves, sinks and recent window included; None if it
            leaves all.
    """

    seen: int
    count: int
    position: int
    recent_from: int
    read: "Callable[[], tuple[Tensor, Tensor]]"
    sinks: int = 0
    stay: int | None = None


class Scorer:
    """Runs a rule on one layer; the base class is a rule that holds nothing.

    A scorer receives every segment (`observe`), and after each compaction the slots that stayed
    (`keep`). Its results may depend on nothing else: then a pass over a whole text evicts the same
    slots as the deployed cache token by token.

    Attributes:
        running: sums of what slots receive, if `observe` does no more than adding to them: then a
            token is decoded by one op for the layer. None: with the same result, more slowly.
    """

    running: "RunningSums | None" = None

    def row_weights(self, visible: "Tensor", left: "Tensor") -> "Tensor":
        """Factor of each query row in what slots receive, `[M]`; for rules that need `attention`.

        Args:
            visible: keys that each row sees, itself included, `[M]`.
            left: rows after each row and before the next compaction, `[M]`.
        """
        raise NotImplementedError

    def watched(self, count: int, left: int) -> int:
        """How many of the newest queries are wanted one by one; for rules that need `rows`.

        Args:
            count: queries of a segment.
            left: tokens after them and before the next compaction.
        """
        raise NotImplementedError

    def observe(self, segment: Segment) -> None:
        """Take in what a segment brought."""

    def ranks(self, slots: Slots) -> "Tensor":
        """Ranks `[B, V, N]` fp32 of all slots, higher stays; `V` is the KV heads, or 1.

        Where heads vote together (`Rule.share`), ranks of several heads are averaged.
        """
        raise NotImplementedError

    def keep(self, index: "Tensor | None") -> None:
        """A compaction kept the slots `index` (`[N']` or `[B, V, N']`; None: all of them)."""

    def drop(self, index: "Tensor") -> None:
        """An anchor closed its sequence between compactions, and the slots `index` stay."""
        self.keep(index)

    @property
    def nbytes(self) -> int:
        """Bytes per sequence of every tensor held."""
        return 0

    def reorder(self, rows: "Tensor") -> None:
        """Select batch rows (beam search)."""


class Rule(Frozen):
    """Description of a retention rule: one file, one line in `kvsearch.rules.RULES`.

    Class attributes:
        needs: what the scorer reads.
        paper: one line for `kvsearch methods`.
        presets: names under which a search reaches the rule -> fields.
        methods: published methods -> knobs of `kvsearch.policy_space` and one line about them.
        axes: fields that a search may vary, as knobs `rule.<field>`, and for each the feature that
            shows it. Bounds are the field's own.
        feature_names: features in which the presets differ, or which tell the rule from others;
            rules that mean the same by a name share it.
        fast: replays that support this rule; others run it segment by segment. `scan` serves
            the sums of an `AttentionScorer`, which are never negative, and no other scorer.
    """

    name: str
    share: Literal["head", "layer"] = "head"

    needs: ClassVar[frozenset[Need]] = frozenset()
    paper: ClassVar[str] = ""
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    methods: ClassVar[Mapping[str, tuple[Mapping[str, Any], str]]] = {}
    axes: ClassVar[Mapping[str, str]] = {"share": "layer-shared"}
    feature_names: ClassVar[tuple[str, ...]] = ()
    fast: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="after")
    def _own_name(self) -> "Rule":
        if self.name != (own := type(self).model_fields["name"].default):
            raise ValueError(f"name must be {quoted(own)}, got {quoted(self.name)}")
        return self

    # -- integers ------------------------------------------------------------------------------

    def voters(self, kv_heads: int) -> int:
        """Rows of ranks: every KV head chooses its own slots, or all of them vote together."""
        return 1 if self.share == "layer" else kv_heads

    def slot_bytes(self, interval: int) -> int:
        """Bytes that the scorer holds per slot and voter."""
        return 0

    def layer_bytes(self, heads: int, kv_heads: int, head_dim: int) -> int:
        """Bytes that the scorer holds per layer, whatever the number of slots."""
        return 0

    def check(self, interval: int, trigger: str) -> None:
        """Raise a `ValueError` that says which field does not go with the policy's schedule."""

    @property
    def together(self) -> int:
        """Tokens that stay or go together; a layer has at least as many slots."""
        return 1

    def lies_in(self, folder: Path) -> None:
        """A policy file with the rule was read from `folder`, where other files of it lie."""

    def fitted(self, interval: int) -> "Rule":
        """The rule with numbers that go with `interval`, for a search that draws both."""
        return self

    @property
    def files(self) -> tuple[str, ...]:
        """Names of files that lie beside a policy file with the rule."""
        return ()

    # -- search and people ---------------------------------------------------------------------

    def canonical(self) -> dict[str, Any]:
        """Fields that change what the rule does; equal dictionaries mean equal behaviour."""
        return self.model_dump()

    def features(self) -> dict[str, float]:
        """Coordinates for the model of the loss, each about 0 to 1.

        Keys are `feature_names` and the features of `axes`.
        """
        return {"layer-shared": float(self.share == "layer")}

    def family(self) -> str:
        """Name for people of a policy that evicts by this rule, such as `H2O-like`."""
        return self.name

    def words(self) -> list[str]:
        """Phrases that tell this rule from others of its family."""
        return []

    # -- running -------------------------------------------------------------------------------

    def scorer(self, place: Place) -> Scorer:
        """A fresh scorer for one layer."""
        raise NotImplementedError


def ranked_by(ranks: "Callable[[Slots], Tensor]", needs: Collection[Need] = ()) -> type[Rule]:
    """A rule of one function, named as the function is; it holds nothing and learns nothing.

    Args:
        ranks: `[B, V, N]` fp32 of all slots at a compaction, higher stays; see `Scorer.ranks`.
        needs: what it reads, of `keys` and `values`.
    """

    reads = frozenset(needs)

    class RankedScorer(Scorer):
        def ranks(self, slots: Slots) -> "Tensor":
            return ranks(slots)

    class RankedBy(Rule):
        name: str = ranks.__name__.replace("_", "-")
        needs: ClassVar[frozenset[Need]] = reads

        def scorer(self, place: Place) -> Scorer:
            return RankedScorer()

    RankedBy.__doc__ = ranks.__doc__
    return RankedBy


def pick(x: "Tensor", index: "Tensor") -> "Tensor":
    """Take slots of per-slot data `[..., T]`, whose leading axes may broadcast with `index`."""
    if x.dim() == 1:
        return x[index]
    if index.dim() == 1:
        return x.index_select(-1, index)
    if x.shape[:-1] == index.shape[:-1]:
        return x.gather(-1, index)  # without what makes axes alike
    return x.take_along_dim(index, -1)
