"""The few integers of a model that a policy needs, without loading the model."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """Sizes of the cached layers of one model.

    Attributes:
        layers: layers whose cache a policy governs (sliding-window and linear layers excluded).
        kv_heads: KV heads per layer, `H`.
        head_dim: channels of one key and one value, `D`.
        heads: query heads per layer, `Hq`, a multiple of `kv_heads`.
    """

    layers: int
    kv_heads: int
    head_dim: int
    heads: int

    @property
    def slot_bytes(self) -> int:
        """Bytes of one fp16 slot (key and value) in one layer, all KV heads."""
        return 2 * 2 * self.kv_heads * self.head_dim

    def budget_bytes(self, slots: float) -> int:
        """Bytes per sequence of `slots` fp16 slots in every layer: what `--budget` means."""
        return int(slots * self.slot_bytes * self.layers)
