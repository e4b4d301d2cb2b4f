"""KVzip's score, predicted from what goes into a layer (KVzap, arXiv:2601.07891).

A linear map per layer turns a token's hidden state into the logarithm of the score that it would
get if the model read the context again (rule `reread`). So there is no second reading, and no
prompt is needed: the score is known when the token arrives. `kvsearch adapt --rule kvzap` fits the
map to a model; its weights are a file beside the policy, which the policy names by its hash.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from kvsearch.errors import PolicyError
from kvsearch.rules.base import Need, Place, Rule, Segment
from kvsearch.rules.fixed import SCORE_BYTES, FixedScorer

if TYPE_CHECKING:
    from torch import Tensor


class KVzap(Rule):
    """Rank by the predicted logarithm of KVzip's score.

    Attributes:
        weights: SHA-256 of the file with the map's weights; None takes those that were trained on
            this machine for the model. The file lies beside the policy
            and is called `file_of` it.
    """

    name: str = "kvzap"
    weights: str | None = Field(default=None, pattern="^[0-9a-f]{64}$")

    needs: ClassVar[frozenset[Need]] = frozenset({"hidden"})
    paper: ClassVar[str] = "KVzap, arXiv:2601.07891"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"kvzap": {}}
    methods: ClassVar[Mapping[str, tuple[Mapping[str, Any], str]]] = {
        "kvzap": (
            dict(rule="kvzap", interval=16, sinks=4, recent_window="half"),
            "kvzip's score, predicted from hidden states; trained by adapt (arXiv:2601.07891)",
        ),
        "kvzap-prompt": (
            dict(rule="kvzap", sinks=4, budgets="global", trigger="prompt"),
            "kvzap once, after the prompt, one threshold for all heads",
        ),
    }
    feature_names: ClassVar[tuple[str, ...]] = ("predicted",)
    folders: ClassVar[dict[str, Path]] = {}  # of policy files that were read, by the hash

    @property
    def files(self) -> tuple[str, ...]:
        """That with the weights, if the policy names any."""
        return () if self.weights is None else (file_of(self.weights),)

    def lies_in(self, folder: Path) -> None:
        """Note where the policy lies, and so the weights."""
        if self.weights is not None:
            self.folders[self.weights] = folder

    def slot_bytes(self, interval: int) -> int:
        """The score."""
        return SCORE_BYTES

    def features(self) -> dict[str, float]:
        """A flag."""
        return {**super().features(), "predicted": 1.0}

    def family(self) -> str:
        """As published."""
        return "KVzap-like"

    def scorer(self, place: Place) -> "KVzapScorer":
        """Scores of the slots."""
        voters = self.voters(place.kv_heads)
        return KVzapScorer(place.batch, voters, place.device)


class KVzapScorer(FixedScorer):
    """Scores that the cache predicts, see `kvsearch.cache.model.projections`."""

    def arriving(self, segment: Segment) -> "Tensor":
        """What was predicted, its mean over heads that vote together."""
        if segment.predicted is None:
            raise PolicyError(
                "rule 'kvzap' reads the hidden states that go into attention layers, and this "
                "model does not show them; use another rule"
            )
        found = segment.predicted
        return found.mean(1, keepdim=True) if self.scores.shape[1] == 1 else found


def file_of(sha256: str) -> str:
    """Name of a file with weights, by its hash."""
    return f"kvzap-{sha256[:16]}.safetensors"
