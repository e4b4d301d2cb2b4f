"""From what was measured about a model's channels to those that a policy keeps (KVPruner)."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from kvsearch.errors import PolicyError
from kvsearch.policy.channels import ALL, NONE, Channels, mask
from kvsearch.policy.ratios import by_rise, evenly_spaced, smallest_rise, uniform
from kvsearch.policy.shape import ModelShape

Law = Literal["uniform", "eq1", "01", "01-even"]
SCORES = ("l1", "l2", "taylor")
BY_RISE = ("eq1", "01")  # laws that need the rise in perplexity of every layer
WHOLE = ("01", "01-even")  # laws that remove whole layers, whatever the score of a channel
Order = tuple[tuple[tuple[int, ...], ...], ...]  # per layer and KV head, most important first


@dataclass(frozen=True)
class Orders:
    """How channels rank by one score.

    Attributes:
        coupled: rotary pairs by the mean over queries, keys, values and outputs.
        qk: rotary pairs by queries and keys alone.
        vo: channels by values and outputs alone.
    """

    coupled: Order
    qk: Order
    vo: Order

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> "Orders":
        """From `dataclasses.asdict`, lists instead of tuples included."""
        return cls(**{name: tuples(order) for name, order in data.items()})


@dataclass(frozen=True, eq=False)
class Importance:
    """What was measured about a model's channels.

    Attributes:
        ppl_rise: per layer, the rise in perplexity without its attention; empty if not measured.
        orders: score -> ranks of the channels.
    """

    ppl_rise: tuple[float, ...] = ()
    orders: Mapping[str, Orders] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """What `read` takes, for a file."""
        orders = {k: asdict(v) for k, v in self.orders.items()}
        return {"ppl_rise": list(self.ppl_rise), "orders": orders}

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> "Importance":
        """From `plain`, lists instead of tuples included."""
        orders = {score: Orders.read(x) for score, x in data["orders"].items()}
        return cls(tuple(data["ppl_rise"]), orders)


def tuples(x: Any) -> Any:
    """Lists inside lists as tuples."""
    return tuple(map(tuples, x)) if isinstance(x, list | tuple) else x


def channels(
    law: Law,
    ratio: float,
    importance: Importance,
    shape: ModelShape,
    *,
    score: str = "l2",
    qk: float | None = None,
    temperature: float = 1.0,
    multiple: int = 2,
) -> Channels:
    """The channels that stay when a share of them is removed.

    A layer that the law takes all channels of loses its attention. Other shares are rounded to
    whole counts, and leave something of every head.

    Args:
        law: how the share is spread over the layers, see `ratios`.
        ratio: share of channels removed, mean over layers.
        importance: what the law and the score need.
        shape: of the model.
        score: which channels go: a key of `importance.orders`.
        qk: share of query and key pairs removed, ranked apart from values and outputs; None is the
            paper's one set for all four matrices.
        temperature: of equation 1, in units of perplexity; the lower, the more the shares differ.
        multiple: of channels that a head keeps.

    Raises:
        PolicyError: no channel of a head would stay, or something was not measured.
    """
    for name, share in (("ratio", ratio), ("qk", qk or 0.0)):
        if not 0 <= share < 1:
            raise PolicyError(f"channels.{name}: {share:g} would remove every channel of a head")
    if law in BY_RISE and len(importance.ppl_rise) != shape.layers:
        raise PolicyError(
            f"channels {law!r} needs the rise in perplexity without each layer to be measured"
        )
    rise = importance.ppl_rise
    shares = _spread(law, ratio, rise, shape.layers, temperature)
    if law in WHOLE:
        words = tuple(NONE if share else ALL for share in shares)
        return Channels(qk=words, vo=words)
    if score not in importance.orders:
        raise PolicyError(f"channels.score {score!r} needs the channels to be scored")
    orders, D = importance.orders[score], shape.head_dim
    gone = [share >= 1 for share in shares]
    if qk is None:
        pairs = _best(orders.coupled, _counts("ratio", law, shares, D, multiple), 2)
        values = [[(*kept, *(c + D // 2 for c in kept)) for kept in heads] for heads in pairs]
    else:
        apart = _spread(law, qk, rise, shape.layers, temperature, cap=1 - multiple / D)
        pairs = _best(orders.qk, _counts("qk", law, apart, D, multiple), 2)
        values = _best(orders.vo, _counts("ratio", law, shares, D, multiple))
    return Channels(qk=_words(pairs, gone, D // 2), vo=_words(values, gone, D))


def _spread(
    law: Law,
    ratio: float,
    rise: Sequence[float],
    layers: int,
    temperature: float,
    cap: float = 1.0,
) -> list[float]:
    if law == "eq1":
        return by_rise(rise, min(ratio, cap), temperature=temperature, cap=cap)
    if law == "01":
        return smallest_rise(rise, ratio)
    return evenly_spaced(layers, ratio) if law == "01-even" else uniform(layers, ratio)


def _counts(knob: str, law: Law, shares: Sequence[float], head_dim: int, step: int) -> list[int]:
    """Channels that a head of each layer keeps."""
    counts = [int((1 - share) * head_dim / step + 0.5) * step for share in shares]
    if law == "uniform" and 0 in counts:
        raise PolicyError(
            f"channels.{knob}: {max(shares):g} would remove every channel of a head of {head_dim}"
        )
    return [min(max(n, step), head_dim) for n in counts]


def _best(order: Order, counts: Sequence[int], of: int = 1) -> list[list[tuple[int, ...]]]:
    """The most important of every head, where `of` channels count as one."""
    return [[best[: n // of] for best in heads] for heads, n in zip(order, counts, strict=True)]


def _words(
    kept: Sequence[Sequence[tuple[int, ...]]], gone: Sequence[bool], most: int
) -> tuple[str, ...]:
    """The word of every layer, given the kept channels of its heads."""
    return tuple(
        NONE if none else ALL if len(heads[0]) == most else " ".join(mask(head) for head in heads)
        for heads, none in zip(kept, gone, strict=True)
    )
