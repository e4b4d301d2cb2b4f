"""What every KV head of a model loses when it alone keeps less: measured once, read by budgets."""

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Self

from kvsearch.errors import quoted

Rows = tuple[tuple[float, ...], ...]
LEAST = 0.03  # of the mean: what any head is taken to lose


@dataclass(frozen=True)
class HeadLosses:
    """Losses in nats per token, a row a KV head, layer by layer.

    Attributes:
        heads: KV heads of a layer.
        sizes: slots, rising.
        slots: loss by size.
        bits: of keys, or of values, falling.
        keys, values: loss by bits.
        starved: the size at which heads, and layers, are compared.
    """

    heads: int
    sizes: tuple[int, ...]
    slots: Rows
    bits: tuple[int, ...]
    keys: Rows
    values: Rows
    starved: int

    @cached_property
    def sensitivity(self) -> Rows:
        """Loss of a starved head, a row a layer, mean 1, each at least about `LEAST`."""
        each = _shares(self._starved)
        return tuple(tuple(each[i : i + self.heads]) for i in range(0, len(each), self.heads))

    @cached_property
    def of_layers(self) -> tuple[float, ...]:
        """The same for layers: the sum over a layer's heads, mean 1."""
        lost = self._starved
        return tuple(
            _shares([sum(lost[i : i + self.heads]) for i in range(0, len(lost), self.heads)])
        )

    @property
    def _starved(self) -> list[float]:
        at = self.sizes.index(self.starved)
        return [max(row[at], 0.0) for row in self.slots]

    def plain(self) -> dict[str, Any]:
        """Data for a JSON file, four digits a number."""
        return {
            name: [[float(f"{x:.4g}") for x in row] for row in value]
            if name in ("slots", "keys", "values")
            else value
            for name, value in asdict(self).items()
        }

    @classmethod
    def read(cls, data: Any) -> Self:
        """What `plain` gave.

        Raises:
            ValueError: the data are something else.
        """
        try:
            rows = {
                name: tuple(tuple(float(x) for x in row) for row in data[name])
                for name in ("slots", "keys", "values")
            }
            found = cls(
                heads=int(data["heads"]),
                sizes=tuple(int(x) for x in data["sizes"]),
                bits=tuple(int(x) for x in data["bits"]),
                starved=int(data["starved"]),
                **rows,
            )
        except (KeyError, TypeError) as e:
            raise ValueError(f"no losses of heads: {quoted(e)}") from e
        if found.starved not in found.sizes:
            raise ValueError("no losses of heads: no loss of starved heads")
        wide = [(found.slots, found.sizes), (found.keys, found.bits), (found.values, found.bits)]
        for table, names in wide:
            if len(table) != len(found.slots) or any(len(row) != len(names) for row in table):
                raise ValueError("no losses of heads: rows of unequal length")
        numbers = [x for table, _ in wide for row in table for x in row]
        if not all(abs(x) < 1e100 for x in numbers):  # what is not a number, neither
            raise ValueError("no losses of heads: a loss that is not finite")
        if not found.slots or found.heads < 1 or len(found.slots) % found.heads:
            raise ValueError("no losses of heads: not one row for every head")
        return found


def _shares(lost: list[float]) -> list[float]:
    """Losses in units of their mean, four digits, each at least about `LEAST`."""
    mean = max(sum(lost) / len(lost), 1e-12)
    lost = [max(x, LEAST * mean) for x in lost]
    mean = sum(lost) / len(lost)
    return [float(f"{x / mean:.4g}") for x in lost]
