"""Tokens that stand out from the block that follows them stay (LagKV, arXiv:2504.04704).

Slots behind the sinks are cut into blocks of `lag`. Keys and values of a block are scaled per
channel by the range of the next block; a token ranks within its block by how far its channels
spread after that. The last whole block and what follows it have no next block and stay.
"""

from collections.abc import Mapping
from math import log2
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from kvsearch.rules.base import Need, Place, Rule, Scorer, Slots

if TYPE_CHECKING:
    from torch import Tensor


class LagKV(Rule):
    """Rank within blocks of neighbouring slots, by the spread of scaled keys and values.

    The paper cuts a prompt once; here the slots that are held are cut anew at each compaction.

    Attributes:
        lag: slots of a block; the paper and its public code use 128.
        skip: first slots that are not ranked; 4 sinks, as published.
    """

    name: str = "lagkv"
    lag: int = Field(default=128, ge=2)
    skip: int = Field(default=4, ge=0)

    needs: ClassVar[frozenset[Need]] = frozenset({"keys", "values"})
    paper: ClassVar[str] = "LagKV, arXiv:2504.04704"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"lagkv": {}, "lagkv-32": dict(lag=32)}
    methods: ClassVar[Mapping[str, tuple[Mapping[str, Any], str]]] = {
        "lagkv": (
            dict(rule="lagkv-32", interval=32, sinks=4, recent_window=32),
            "tokens that differ from the block after them stay, blocks of 32 (arXiv:2504.04704)",
        ),
    }
    axes: ClassVar[Mapping[str, str]] = {**Rule.axes, "lag": "block", "skip": "skipped"}
    feature_names: ClassVar[tuple[str, ...]] = ("lag",)

    def features(self) -> dict[str, float]:
        """A flag, and sizes on a log scale."""
        return {
            **super().features(),
            "lag": 1.0,
            "block": log2(self.lag) / 10,
            "skipped": log2(1 + self.skip) / 4,
        }

    def family(self) -> str:
        """As published."""
        return "LagKV-like"

    def words(self) -> list[str]:
        """The size of a block."""
        return [f"in blocks of {self.lag}"]

    def scorer(self, place: Place) -> "LagKVScorer":
        """Stateless."""
        return LagKVScorer(self)


class LagKVScorer(Scorer):
    """Reads keys and values at each compaction."""

    def __init__(self, rule: LagKV) -> None:
        self.rule = rule

    def ranks(self, slots: Slots) -> "Tensor":
        """Ranks within a block in `[0, 1)`; 1 for slots that no block follows."""
        keys, values = slots.read()
        out = keys.new_ones(keys.shape[:3]).float()
        lag, first = self.rule.lag, min(self.rule.skip, slots.count)
        blocks = (slots.count - first) // lag
        if blocks < 2:
            return out
        part = slice(first, first + blocks * lag)
        k, v = (_spread(x[:, :, part].float().unflatten(2, (-1, lag))) for x in (keys, values))
        order = (k + v).argsort(dim=-1, stable=True).argsort(-1)
        out[:, :, first : first + (blocks - 1) * lag] = (order / lag).flatten(2)
        return out


def _spread(x: "Tensor") -> "Tensor":
    """Softmax over a block of the deviation over channels, `[B, H, blocks - 1, lag]`."""
    following = x[:, :, 1:]
    low = following.amin(3, keepdim=True)
    width = (following.amax(3, keepdim=True) - low).clamp_min(1e-12)
    return ((x[:, :, :-1] - low) / width).std(-1).softmax(-1)
