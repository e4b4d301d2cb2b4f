"""Keys of small L2 norm stay: they attract attention (Devoto et al. 2024, arXiv:2406.11430)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from kvsearch.rules.base import Need, Place, Rule, Scorer, Slots

if TYPE_CHECKING:
    from torch import Tensor


class KeyNorm(Rule):
    """Rank by the negative L2 norm of the key as it is held; nothing is held beside the cache.

    The paper leaves its first two layers uncompressed; here `budgets` decides that.
    """

    name: str = "key-norm"

    needs: ClassVar[frozenset[Need]] = frozenset({"keys"})
    paper: ClassVar[str] = "Devoto et al., arXiv:2406.11430"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"key-norm": {}}
    methods: ClassVar[Mapping[str, tuple[Mapping[str, Any], str]]] = {
        "key-norm": (
            dict(rule="key-norm", interval=32, recent_window=32),
            "keys of small norm stay (arXiv:2406.11430)",
        ),
    }
    feature_names: ClassVar[tuple[str, ...]] = ("key norm",)

    def features(self) -> dict[str, float]:
        """One flag."""
        return {**super().features(), "key norm": 1.0}

    def family(self) -> str:
        """The paper's own name is a sentence."""
        return "Key-norm"

    def scorer(self, place: Place) -> "KeyNormScorer":
        """Stateless."""
        return KeyNormScorer()


class KeyNormScorer(Scorer):
    """Reads the keys at each compaction."""

    def ranks(self, slots: Slots) -> "Tensor":
        """`-||k||_2`, which rotation does not change."""
        return -slots.read()[0].float().norm(dim=-1)
