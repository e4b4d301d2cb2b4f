"""Attention times what a value changes in the layer's output (CriticalKV, arXiv:2502.03805).

Evicting a slot changes the output by at most its attention times the norm of `W_o v`. A part of the
slots goes to those with most attention whatever their values, the rest to the largest products.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from kvsearch.errors import PolicyError
from kvsearch.rules.attention import Attention, AttentionScorer
from kvsearch.rules.base import Need, Place, Slots

if TYPE_CHECKING:
    from torch import Tensor


EPSILON = 1e-4  # attention a query that no slot falls below, of the public code
ABOVE = 2.0**64  # lifts ranks over all others, and keeps their order
NORM_BYTES = 4  # fp32


class Critical(Attention):
    """`attention` with the same fields, times the L1 norm of `W_o v`, in two stages.

    Attributes:
        first: share of the slots, beside sinks and recent window, that attention alone fills.
    """

    name: str = "critical"
    first: float = Field(default=0.5, ge=0.0, le=1.0)

    needs: ClassVar[frozenset[Need]] = frozenset({"attention", "values", "outputs"})
    paper: ClassVar[str] = "CriticalKV, arXiv:2502.03805"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "critical": {},
        "critical-snapkv": dict(horizon=32, pool=5),
    }
    methods: ClassVar[Mapping[str, tuple[Mapping[str, Any], str]]] = {
        "criticalkv": (
            dict(rule="critical-snapkv", interval=32, recent_window=32),
            "SnapKV's score times the norm of W_o v, in two stages (arXiv:2502.03805)",
        ),
        "criticalkv-prompt": (
            dict(rule="critical-snapkv", interval=32, recent_window=32, trigger="prompt"),
            "criticalkv as published: once, after the prompt",
        ),
    }
    axes: ClassVar[Mapping[str, str]] = {**Attention.axes, "first": "attention first"}
    feature_names: ClassVar[tuple[str, ...]] = (*Attention.feature_names, "output norm")
    fast: ClassVar[frozenset[str]] = frozenset()  # the scan holds no values in order of slots

    def slot_bytes(self, interval: int) -> int:
        """As `attention`, and the norm."""
        return super().slot_bytes(interval) + NORM_BYTES

    def canonical(self) -> dict[str, Any]:
        """As `attention`, under its own name."""
        return {"name": self.name, **super().canonical()}

    def features(self) -> dict[str, float]:
        """As `attention`, and two more."""
        return {**super().features(), "output norm": 1.0, "attention first": self.first}

    def family(self) -> str:
        """Whatever the powers."""
        return "CriticalKV-like"

    def words(self) -> list[str]:
        """As `attention`, and the first stage."""
        return [*super().words(), f"{100 * self.first:.3g} % by attention alone"]

    def scorer(self, place: Place) -> "CriticalScorer":
        """Running sums per slot, and norms."""
        return CriticalScorer(self, place)


class CriticalScorer(AttentionScorer):
    """Sums per slot, and norms of the slots that have been through a compaction.

    Attributes:
        norms: L1 norms of `W_o v` `[B, V, K]` fp32, of the values as they were held when they were
            read: at the first compaction that evicts after their token came.
    """

    def __init__(self, rule: Critical, place: Place) -> None:
        import torch

        if place.output is None:
            raise PolicyError(f"rule {rule.name!r} needs the layer's output projection")
        super().__init__(rule, place)
        self.first, self._output = rule.first, place.output
        self.running.alone = False  # norms move too
        shape = (place.batch, rule.voters(place.kv_heads), 0)
        self.norms = torch.zeros(shape, device=place.device, dtype=torch.float32)

    def ranks(self, slots: Slots) -> "Tensor":
        """Sums, smoothed outside the recent window, times norms; the first stage above all."""
        score = self.smooth(self.corrected(slots.seen), slots.recent_from)
        floor = EPSILON * (self.rule.horizon or 1)
        ranks = (score + floor) * self._read(slots)
        if slots.stay is None:
            return ranks
        free = slice(slots.sinks, slots.recent_from)
        count = int(self.first * max(0, slots.stay - slots.count + slots.recent_from - slots.sinks))
        best = score[..., free].sort(dim=-1, stable=True, descending=True).indices[..., :count]
        return lifted(ranks, best + slots.sinks)

    def _read(self, slots: Slots) -> "Tensor":
        """Norms of all slots `[B, V, N]`; values are read of those that came since."""
        import torch

        known = self.norms.shape[-1]
        if known < slots.count:
            new = self._output(slots.read()[1][:, :, known:])
            if self.norms.shape[1] == 1:
                new = new.mean(1, keepdim=True)
            self.norms = torch.cat([self.norms, new], -1)
        return self.norms

    def drop(self, index: "Tensor") -> None:
        """Drop all slots but `index`; norms that are not known of all are read again."""
        from kvsearch.rules.base import pick

        whole = self.norms.shape[-1] == self.sums.shape[-1]
        self.norms = pick(self.norms, index) if whole else self.norms[..., :0]
        super().drop(index)

    @property
    def nbytes(self) -> int:
        """Sums, ages and norms; those to come are counted from the token's arrival."""
        shape = self.sums.shape
        return super().nbytes + NORM_BYTES * shape[2] * shape[3]

    def reorder(self, rows: "Tensor") -> None:
        """Select batch rows (beam search)."""
        super().reorder(rows)
        self.norms = self.norms[rows]


def lifted(ranks: "Tensor", first: "Tensor", by: "Tensor | float" = ABOVE) -> "Tensor":
    """Ranks `[B, V, N]`, those of the slots `first` `[B, V, K]` multiplied."""
    import torch

    lift = torch.ones_like(ranks)
    return ranks * lift.scatter(-1, first, by)
