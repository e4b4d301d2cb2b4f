"""The most attention that a second reading of the prompt gives (KVzip, arXiv:2505.23416).

Once it has taken in a prompt the model reads it again, after an instruction to repeat it. What it
looks up in the cache meanwhile is what the text cannot be reconstructed without, whatever is asked
later. The cache runs this reading (`kvsearch.cache.rereading`); the scorer holds the result until
the compaction that follows.
"""

from collections.abc import Mapping
from math import log2
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from kvsearch.errors import PolicyError
from kvsearch.rules.base import Need, Place, Rule, Scorer, Slots

if TYPE_CHECKING:
    from torch import Tensor


class Reread(Rule):
    """Rank by the largest attention of any query that reads the prompt again.

    Attributes:
        instruction: what is read before the prompt comes again: KVzip's words, or nothing.
        chunk: tokens of the prompt that are read again at once. Those of a chunk are scored by the
            attention among sinks, the chunk, and what is read again.
    """

    name: str = "reread"
    instruction: Literal["none", "repeat"] = "none"
    chunk: int = Field(default=2048, ge=1, le=1 << 31)

    needs: ClassVar[frozenset[Need]] = frozenset({"rereading"})
    paper: ClassVar[str] = "KVzip, arXiv:2505.23416"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "reread": {},
        "kvzip": dict(instruction="repeat"),
    }
    methods: ClassVar[Mapping[str, tuple[Mapping[str, Any], str]]] = {
        "kvzip": (
            dict(rule="kvzip", sinks=4, budgets="global", trigger="prompt"),
            "the most attention when the prompt is read again, one threshold for all heads "
            "(arXiv:2505.23416)",
        ),
    }
    axes: ClassVar[Mapping[str, str]] = {
        **Rule.axes,
        "instruction": "instructed",
        "chunk": "read at once",
    }
    feature_names: ClassVar[tuple[str, ...]] = ("read again",)

    def check(self, interval: int, trigger: str) -> None:
        """A prompt is read again once, when it is whole."""
        if trigger != "prompt":
            raise ValueError(
                f"rule {self.name!r} reads the prompt again and needs trigger 'prompt', "
                f"got {trigger!r}"
            )

    def features(self) -> dict[str, float]:
        """Flags, and the chunk on a log scale."""
        more = {"instructed": self.instruction != "none", "read at once": log2(self.chunk) / 16}
        return {**super().features(), "read again": 1.0, **more}

    def family(self) -> str:
        """Whatever the instruction."""
        return "KVzip-like"

    def words(self) -> list[str]:
        """Whether there is an instruction."""
        return ["without an instruction"] if self.instruction == "none" else []

    def scorer(self, place: Place) -> "RereadScorer":
        """Scores of the prompt, until its compaction."""
        return RereadScorer()


class RereadScorer(Scorer):
    """Holds what a second reading finds; nothing before it, and nothing after the compaction.

    Attributes:
        scores: `[B, H, N]` fp32, or None.
    """

    def __init__(self) -> None:
        self.scores: Tensor | None = None

    def take(self, start: int, scores: "Tensor", count: int) -> None:
        """Take the scores `[B, H, M]` of the slots from `start` on, of `count` in all."""
        if self.scores is None:
            self.scores = scores.new_zeros(*scores.shape[:2], count)
        self.scores[..., start : start + scores.shape[-1]] = scores

    def ranks(self, slots: Slots) -> "Tensor":
        """The scores."""
        if self.scores is None:
            raise PolicyError("rule 'reread': the model did not read the prompt again")
        return self.scores

    def keep(self, index: "Tensor | None") -> None:
        """Forget the scores: no other compaction follows."""
        self.scores = None
