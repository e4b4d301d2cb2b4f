"""From a policy and a model shape to integers: slots per layer, tier counts, bytes, compactions.

Everything here is exact and independent of data: the runtime, the evaluator and the budget all
read the same numbers.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import groupby, islice
from typing import Any

from kvsearch.errors import PolicyError
from kvsearch.policy.budgets import Slots, ladder_of, share_out, spared, units
from kvsearch.policy.ladder import Rungs, offset
from kvsearch.policy.layer_bytes import Cost, Held, ceiling, stream_peak
from kvsearch.policy.policy import Policy
from kvsearch.policy.schedule import Clock, Evictions
from kvsearch.policy.shape import ModelShape


@dataclass(frozen=True, eq=False)
class LayerLayout:
    """The integers of one layer, or of those of its KV heads that are alike.

    Attributes:
        policy: what these heads do.
        shape: of the model, with as many heads as there are of these.
        slots: most tokens that each of these heads ever holds, or None.
        interval: tokens between compactions; None never compacts.
        rungs: integers of its ladder, or None.
        offset: first kept rung of its ladder.
        cost: its bytes.
        key_dim, value_dim: channels of one key and one value; 0 of a layer without attention.
        layer: its number, shallow to deep.
        heads: which KV heads of the layer these are, neighbours.
    """

    policy: Policy
    shape: ModelShape
    slots: int | None
    interval: int | None
    rungs: Rungs | None
    offset: int
    cost: Cost
    key_dim: int
    value_dim: int
    layer: int
    heads: range

    @property
    def target(self) -> int | None:
        """Tokens left after a compaction, at most."""
        return None if self.slots is None else self.slots - self.policy.interval

    @cached_property
    def clock(self) -> Clock:
        """When the layer is compacted."""
        return Clock(self.interval, self.policy.trigger)

    @cached_property
    def evictions(self) -> Evictions:
        """What a compaction drops; a ladder spares so many new slots that a whole one fits."""
        p = self.policy
        kept = spared(p, p.recent_window, self.rungs)
        return Evictions(self.target, p.sinks, kept, self.rungs, self.offset)

    def tier_counts(self, n: int) -> tuple[int, ...]:
        """Tokens of each tier after a compaction left `n`; sinks in 16 bits come off first.

        With a slot limit the shares are of the layer's capacity and better tiers fill first;
        without one they are of the tokens held.
        """
        return self.cost.tier_counts(n, self.target)

    def bytes(self, compacted: int, residual: int) -> int:
        """Bytes of one sequence's cache in this layer.

        Args:
            compacted: tokens held that have been through a compaction.
            residual: newer tokens, still in 16 bits.
        """
        return self.cost.bytes(compacted, residual, self.target)

    def after(self, prompt: int) -> "LayerLayout":
        """The layer after a prompt of so many tokens, see `Policy.after`."""
        if self.policy.trigger != "generation":
            return self
        policy = self.policy.after(prompt)
        cost = Cost(policy, self.shape, (self.key_dim, self.value_dim))
        slots = None if self.slots is None else self.slots + prompt
        return replace(self, policy=policy, slots=slots, cost=cost)

    def intervals(self, tokens: int, prompt: int = 0) -> Iterator[tuple[int, int]]:
        """Yield (compacted tokens held, new tokens until the next compaction) over a stream."""
        seen = compacted = 0
        while seen < tokens:
            due = self.clock.after(seen, prompt)
            end = tokens if due is None else min(due, tokens)
            yield compacted, end - seen
            if end == due:
                compacted = self.evictions.left(compacted + end - seen)
            else:
                compacted += end - seen
            seen = end


@dataclass(frozen=True, eq=False)
class Layout:
    """The layouts of all layers, and the bytes they add up to.

    Attributes:
        shape: of what the policy's channels leave of the model.
        units: the shape whose layers have slots and tiers of their own: layers, or KV heads.
        slots: most tokens of each unit, or None.
        tiers: which of `Policy.every_tiers` each unit uses.
        kinds: which of `costs` counts each unit.
        rungs: integers of the ladder, or None.
        costs: bytes of a unit, see `costs_of`.
        whole: the shape of the model.
    """

    policy: Policy
    shape: ModelShape
    units: ModelShape
    slots: Slots
    tiers: tuple[int, ...]
    kinds: tuple[int, ...]
    rungs: Rungs | None
    costs: tuple[Cost, ...]
    whole: ModelShape

    def after(self, prompt: int) -> "Layout":
        """The layout after a prompt of so many tokens, see `Policy.after`."""
        if self.policy.trigger != "generation":
            return self
        policy = self.policy.after(prompt)
        slots: Any = tuple(None if n is None else n + prompt for n in self.slots)
        return replace(self, policy=policy, slots=slots, costs=costs_of(policy, self.whole))

    @cached_property
    def layers(self) -> tuple[LayerLayout, ...]:
        """Layer by layer, and within a layer one for each kind of its KV heads.

        A search that only asks for bytes never needs them.
        """
        each = self.units.layers // self.shape.layers
        return tuple(
            part
            for i in range(self.shape.layers)
            for part in self._parts(i, range(i * each, (i + 1) * each))
        )

    def _parts(self, layer: int, units: range) -> Iterator[LayerLayout]:
        """One layer's; neighbouring KV heads with the same slots and tiers go together."""
        p, r, shape = self.policy, self.rungs, self.shape
        order = p.ladder.order if p.ladder is not None else "modular"
        apart = p.budgets.kind == "adakv"  # they start alike and part with time
        each, group = shape.kv_heads // len(units), shape.heads // shape.kv_heads
        kinds = [(self.slots[u], self.tiers[u], u if apart else 0) for u in units]
        for (slots, which, _), same in groupby(range(len(units)), kinds.__getitem__):
            found = list(same)
            heads = range(found[0] * each, (found[-1] + 1) * each)
            mine = replace(shape, kv_heads=len(heads), heads=len(heads) * group)
            plain = self.units is shape and p.head_tiers is None
            own = p if plain else self._alike[which]
            unit = units[found[0]]
            keys, values = self.units.per_layer[unit]
            yield LayerLayout(
                policy=own,
                shape=mine,
                slots=slots,
                interval=p.interval if p.compacts else None,
                rungs=r,
                offset=offset(layer, r, order) if r else 0,
                cost=self._cost(own, mine, unit),
                key_dim=keys,
                value_dim=values,
                layer=layer,
                heads=heads,
            )

    def _cost(self, own: Policy, shape: ModelShape, unit: int) -> Cost:
        """Bytes of the heads of `shape`, the first of which is `unit`."""
        if self.units is self.shape:
            return self.costs[self.kinds[unit]]
        return Cost(own, shape, self.units.per_layer[unit])

    @cached_property
    def _alike(self) -> tuple[Policy, ...]:
        return tuple(self.policy.alike(i) for i in range(len(self.policy.every_tiers)))

    @cached_property
    def distinct(self) -> list[tuple[LayerLayout, int]]:
        """Layers with the same byte history, and how many there are of each."""
        groups: dict[tuple[object, ...], tuple[LayerLayout, int]] = {}
        for layer in self.layers:
            widths = layer.key_dim, layer.value_dim
            key = (layer.slots, layer.policy.tiers, layer.shape.kv_heads, widths)
            first, count = groups.get(key, (layer, 0))
            groups[key] = (first, count + 1)
        return list(groups.values())

    def horizon(self) -> int | None:
        """Tokens after which the peak has certainly been reached, or None if it never is."""
        p = self.policy
        if p.slots is None or p.trigger == "prompt":
            return None
        # ladders free R slots at a time: full layers repeat within R compactions
        slack = 4 + (self.rungs.R if self.rungs else 0)
        return max(n or 0 for n in self.slots) + slack * p.interval

    def bytes_peak(self, tokens: int | None = None, prompt: int = 0) -> int:
        """Most bytes per sequence at any step of a stream of `tokens`, the step's token included.

        With `tokens` None the stream is endless; a policy without a limit then raises.
        Keys and values of a prompt that one forward call brings in are activations until the
        call ends and are not counted.
        """
        if (there := self.after(prompt)) is not self:
            return there.bytes_peak(tokens, prompt)
        if tokens is None:
            tokens = self.horizon()
            if tokens is None:
                raise PolicyError("the cache grows with the text: say how many tokens")
            tokens += prompt
        start = prompt if self.policy.trigger != "stream" else 0
        if (tokens, start) not in self._peaks:
            self._peaks[tokens, start] = self._peak(tokens, start)
        return self._peaks[tokens, start]

    @cached_property
    def _peaks(self) -> dict[tuple[int, int], int]:
        return {}

    def _peak(self, tokens: int, start: int) -> int:
        held = _held(self.costs, self.slots, self.kinds)
        if self.policy.anchors is not None:
            return ceiling(self.policy, held, tokens, start)
        if (peak := stream_peak(self.policy, held, self.rungs, tokens)) is not None:
            return peak
        limit = self.horizon()
        if limit is not None and self.rungs is None and tokens >= limit + start:
            c = (
                self.policy.interval
            )  # every layer is full, and a compaction leaves exactly its target
            return sum(n * layer.bytes(layer.target or 0, c) for layer, n in self.distinct)
        if limit is not None:
            tokens = min(tokens, limit + start)
        last = self.bytes_at(tokens, start)  # a compaction may end with more bytes than it found
        totals: dict[
            int, int
        ] = {}  # bytes just before each compaction; compactions are common to all layers
        for layer, count in self.distinct:
            for i, (compacted, residual) in enumerate(layer.intervals(tokens, start)):
                prompt_call = start > 0 and i == 0 and layer.interval is not None
                now = (layer.evictions.left(residual), 0) if prompt_call else (compacted, residual)
                totals[i] = totals.get(i, 0) + count * layer.bytes(*now)
        return max(last, *totals.values())

    def bytes_mean(self, tokens: int, prompt: int = 0) -> float:
        """Bytes per sequence averaged over the steps of a stream of `tokens`.

        With anchors, those of a text without any: see `sequences.text_bytes`.
        """
        if (there := self.after(prompt)) is not self:
            return there.bytes_mean(tokens, prompt)
        start = prompt if self.policy.trigger != "stream" else 0
        total = 0
        for layer, count in self.distinct:
            slope = layer.bytes(0, 1) - layer.bytes(0, 0)
            found = Counter(islice(layer.intervals(tokens, start), start > 0, None))
            for (compacted, m), times in found.items():  # few differ once a layer is full
                steps = m * layer.bytes(compacted, 0) + slope * m * (m + 1) // 2
                total += count * times * steps
        return total / max(1, tokens - start)

    def bytes_at(self, seen: int, prompt: int = 0) -> int:
        """Bytes per sequence right after the `seen`-th token; with anchors, at most."""
        if (there := self.after(prompt)) is not self:
            return there.bytes_at(seen, prompt)
        if self.policy.anchors is not None:
            return ceiling(self.policy, _held(self.costs, self.slots, self.kinds), seen, prompt)
        start = prompt if self.policy.trigger != "stream" else 0
        total = 0
        for layer, count in self.distinct:
            compacted, residual = 0, 0
            for compacted, residual in layer.intervals(seen, start):  # noqa: B007 - the last one counts
                pass
            if layer.clock.due(seen, start):
                compacted, residual = layer.evictions.left(compacted + residual), 0
            total += count * layer.bytes(compacted, residual)
        return total


def _held(costs: tuple[Cost, ...], slots: Slots, kinds: tuple[int, ...]) -> Held:
    """Slots of the units, by the cost that counts them."""
    if len(costs) == 1:
        return [(costs[0], Counter(slots))]
    found = Counter(zip(kinds, slots, strict=True))
    return [
        (costs[i], {n: many for (kind, n), many in found.items() if kind == i})
        for i in sorted({*kinds})
    ]


def _tiers(policy: Policy, shape: ModelShape) -> tuple[int, ...]:
    """Which of `Policy.every_tiers` each unit uses."""
    own, many = policy.head_tiers, units(policy, shape).layers
    if own is None:
        return (0,) * many
    each = many // shape.layers
    return tuple(i for row in own.of for i in (row if isinstance(row, tuple) else (row,) * each))


def kinds_of(policy: Policy, shape: ModelShape) -> tuple[int, ...]:
    """Which of `costs_of` counts each unit."""
    tiers = _tiers(policy, shape)
    unit = units(policy, policy.channels.on(shape))
    if not unit.widths:
        return tiers
    widths = unit.kinds
    return tuple(
        which * len(widths) + widths.index(w)
        for which, w in zip(tiers, unit.per_layer, strict=True)
    )


def costs_of(policy: Policy, shape: ModelShape) -> tuple[Cost, ...]:
    """Bytes of a layer, or KV head, by its tiers and then its widths; slots do not change them."""
    unit, plain = units(policy, policy.channels.on(shape)), policy.head_tiers is None
    each = [policy] if plain else [policy.alike(i) for i in range(len(policy.every_tiers))]
    return tuple(Cost(own, unit, widths) for own in each for widths in unit.kinds)


def _make(policy: Policy, shape: ModelShape) -> Layout:
    slots = share_out(policy, shape)
    left = policy.channels.on(shape)
    tiers, kinds = _tiers(policy, shape), kinds_of(policy, shape)
    rung, costs = ladder_of(policy, shape), costs_of(policy, shape)
    return Layout(policy, left, units(policy, left), slots, tiers, kinds, rung, costs, shape)


class _Key:
    """A policy as a key of the cache of layouts: everything but its labels."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.fields: tuple[Any, ...] = tuple(
            v for k, v in policy.__dict__.items() if k not in ("name", "about")
        )

    def __hash__(self) -> int:
        return hash(self.fields)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.fields == other.fields


@lru_cache(maxsize=2048)
def _layout(key: _Key, shape: ModelShape) -> Layout:
    policy = key.policy
    if policy.name is not None or policy.about:
        policy = policy.model_copy(update={"name": None, "about": {}})
    return _make(policy, shape)


def layout(policy: Policy, shape: ModelShape) -> Layout:
    """The integers of `policy` on a model of `shape`.

    Raises:
        PolicyError: the slots cannot hold what the policy promises never to evict.
    """
    return _layout(_Key(policy), shape)


def peak_of(
    policy: Policy, shape: ModelShape, costs: tuple[Cost, ...], tokens: int, prompt: int = 0
) -> int:
    """`Layout.bytes_peak` where costs are known, which do not depend on slots or recent window.

    Args:
        policy: what runs.
        shape: of the model.
        costs: its bytes, see `costs_of`.
        tokens: length of the stream.
        prompt: tokens that one forward call brings in at its start.

    Raises:
        PolicyError: the slots cannot hold what the policy promises never to evict.
    """
    each = share_out(policy, shape)
    held = _held(costs, each, kinds_of(policy, shape))
    if policy.anchors is not None:
        return ceiling(policy, held, tokens, prompt)
    peak = stream_peak(policy, held, ladder_of(policy, shape), tokens)
    if peak is not None and policy.trigger != "generation":
        return peak
    return _make(policy, shape).bytes_peak(tokens, prompt)
