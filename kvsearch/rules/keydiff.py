"""Unusual keys stay (KeyDiff, arXiv:2504.15364): keys that point where most keys point go first."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from kvsearch.rules.base import Need, Place, Rule, Scorer, Slots

if TYPE_CHECKING:
    from torch import Tensor


class KeyDiff(Rule):
    """Rank by the negative cosine between a key and the anchor, the mean direction of all keys.

    Attributes:
        anchor: `normalised` averages unit keys, as kvpress does; `plain` averages the keys
            themselves.
    """

    name: str = "keydiff"
    anchor: Literal["normalised", "plain"] = "normalised"

    needs: ClassVar[frozenset[Need]] = frozenset({"keys"})
    paper: ClassVar[str] = "KeyDiff, arXiv:2504.15364"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"keydiff": {}}
    methods: ClassVar[Mapping[str, tuple[Mapping[str, Any], str]]] = {
        "keydiff": (
            dict(rule="keydiff", interval=32, recent_window=32),
            "keys unlike the others stay (arXiv:2504.15364)",
        ),
    }
    axes: ClassVar[Mapping[str, str]] = {**Rule.axes, "anchor": "plain anchor"}
    feature_names: ClassVar[tuple[str, ...]] = ("key direction",)

    def features(self) -> dict[str, float]:
        """Flags."""
        plain = float(self.anchor == "plain")
        return {**super().features(), "key direction": 1.0, "plain anchor": plain}

    def family(self) -> str:
        """As published."""
        return "KeyDiff-like"

    def scorer(self, place: Place) -> "KeyDiffScorer":
        """Stateless."""
        return KeyDiffScorer(self)


class KeyDiffScorer(Scorer):
    """Reads the keys at each compaction; the anchor is the mean over the slots that are held."""

    def __init__(self, rule: KeyDiff) -> None:
        self.rule = rule

    def ranks(self, slots: Slots) -> "Tensor":
        """`-cos(k, anchor)`; keys carry the rotation that attention sees."""
        keys = slots.read()[0].float()
        unit = keys / keys.norm(dim=-1, keepdim=True).clamp_min(1e-12)
        mean = (unit if self.rule.anchor == "normalised" else keys).mean(2, keepdim=True)
        anchor = mean / mean.norm(dim=-1, keepdim=True).clamp_min(1e-12)
        return -(unit * anchor).sum(-1)
