"""Random scores: the control that every other rule has to beat (kvpress's RandomPress).

A token's score is a hash of seed, layer, KV head and the token's index in the stream. So it does
not depend on how the stream is cut, and the slots of a full cache are a uniform sample of all
tokens so far: one token is as likely to be held as any other, whatever its age.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from kvsearch.rules.base import Place, Rule, Segment
from kvsearch.rules.fixed import SCORE_BYTES, FixedScorer

if TYPE_CHECKING:
    from torch import Tensor

WORD = (1 << 32) - 1


class Random(Rule):
    """Rank by a random score, drawn once a token.

    Attributes:
        seed: of the hash; other seeds hold other tokens.
    """

    name: str = "random"
    seed: int = Field(default=0, ge=0, le=WORD)

    paper: ClassVar[str] = "the control; kvpress's RandomPress"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"random": {}}
    methods: ClassVar[Mapping[str, tuple[Mapping[str, Any], str]]] = {
        "random": (
            dict(rule="random", interval=32, sinks=4, recent_window=32),
            "a random sample of the past beside sinks and recent window: the control",
        ),
        "random-prompt": (
            dict(rule="random", interval=32, sinks=4, recent_window=32, trigger="prompt"),
            "random once, after the prompt",
        ),
    }
    axes: ClassVar[Mapping[str, str]] = {**Rule.axes, "seed": "seed"}
    feature_names: ClassVar[tuple[str, ...]] = ("random",)

    def slot_bytes(self, interval: int) -> int:
        """The score."""
        return SCORE_BYTES

    def features(self) -> dict[str, float]:
        """A flag, and a number that differs from seed to seed."""
        return {**super().features(), "random": 1.0, "seed": 1 - 1 / (1 + self.seed)}

    def family(self) -> str:
        """No paper's name."""
        return "Random"

    def words(self) -> list[str]:
        """The seed, where it is not the default."""
        return [f"seed {self.seed}"] if self.seed else []

    def scorer(self, place: Place) -> "RandomScorer":
        """Scores of the slots."""
        return RandomScorer(self, place)


class RandomScorer(FixedScorer):
    """Scores that are drawn, uniform in `[0, 1)`."""

    def __init__(self, rule: Random, place: Place) -> None:
        import torch

        voters = rule.voters(place.kv_heads)
        super().__init__(place.batch, voters, place.device)
        keys = torch.arange(place.first_head, place.first_head + voters, device=place.device)
        if rule.share == "layer":
            keys = torch.zeros_like(keys)
        base = _mixed(_mixed((rule.seed + 0x9E3779B9) & WORD) ^ place.layer)
        self.keys = _mixed(keys ^ base).unsqueeze(-1)  # [V, 1]

    def arriving(self, segment: Segment) -> "Tensor":
        """Draw the scores of the new tokens."""
        import torch

        stop = segment.seen + segment.count
        index = torch.arange(segment.seen, stop, device=self.scores.device)
        new = (_mixed(self.keys ^ index) >> 8).float() / (1 << 24)  # 24 bits are exact in fp32
        return new.expand(self.scores.shape[0], -1, -1)


def _mixed(x: Any) -> Any:
    """MurmurHash3's finalizer: a bijection of 32-bit words, of an integer or an int64 tensor.

    Products may overflow an int64; their low 32 bits, which are all that is kept, do not.
    """
    x = (x ^ (x >> 16)) & WORD
    x = (x * 0x85EBCA6B) & WORD
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & WORD
    return x ^ (x >> 16)
