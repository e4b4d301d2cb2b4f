"""The few integers of a model that a policy needs, without loading the model."""

from dataclasses import dataclass, replace

Widths = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ModelShape:
    """Sizes of the cached layers of one model.

    Attributes:
        layers: layers whose cache a policy governs (sliding-window and linear layers excluded).
        kv_heads: KV heads per layer, `H`.
        head_dim: channels of one key and one value, `D`.
        heads: query heads per layer, `Hq`, a multiple of `kv_heads`.
        widths: channels of one key and one value per layer, where channels were removed; (0, 0) is
            a layer without attention. Empty is `head_dim` for both, everywhere.
        others: layers of the model beside those, which no policy governs.
    """

    layers: int
    kv_heads: int
    head_dim: int
    heads: int
    widths: Widths = ()
    others: int = 0

    def __post_init__(self) -> None:
        pairs = tuple((int(k), int(v)) for k, v in self.widths)  # lists, where a file was read
        object.__setattr__(self, "widths", pairs)

    def with_widths(self, widths: Widths) -> "ModelShape":
        """The same with such keys and values; whole ones in every layer are not listed."""
        whole = all(w == (self.head_dim, self.head_dim) for w in widths)
        return replace(self, widths=() if whole else widths)

    @property
    def per_layer(self) -> Widths:
        """Channels of one key and one value of each layer."""
        return self.widths or ((self.head_dim, self.head_dim),) * self.layers

    @property
    def kinds(self) -> Widths:
        """The different widths that layers have."""
        return tuple(dict.fromkeys(self.per_layer))

    @property
    def slot_bytes(self) -> int:
        """Bytes of one fp16 slot (key and value) in one whole layer, all KV heads."""
        return 2 * 2 * self.kv_heads * self.head_dim

    def budget_bytes(self, slots: float) -> int:
        """Bytes per sequence of `slots` fp16 slots in every layer: what `--budget` means."""
        if self.widths:
            return int(slots * sum(2 * self.kv_heads * (k + v) for k, v in self.widths))
        return int(slots * self.slot_bytes * self.layers)

    def plain(self) -> dict[str, object]:
        """The fields for a record; widths and other layers only where there are any."""
        return {k: v for k, v in self.__dict__.items() if k not in ("widths", "others") or v}
