"""From a policy and a model shape to integers: slots per layer, tier counts, bytes, compactions.

Everything here is exact and independent of data: the runtime, the evaluator and the budget all
read the same numbers.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from kvsearch.errors import PolicyError
from kvsearch.policy.cost import Cost, costs, stream_peak
from kvsearch.policy.ladder import Rungs, offset, rungs
from kvsearch.policy.parts import Budgets
from kvsearch.policy.schedule import Clock, Evictions
from kvsearch.policy.shape import ModelShape
from kvsearch.policy.types import Policy


@dataclass(frozen=True, eq=False)
class LayerLayout:
    """The integers of one layer.

    Attributes:
        slots: most tokens this layer ever holds, or None.
        rungs: integers of its ladder, or None.
        offset: first kept rung of its ladder.
        cost: its bytes.
        key_dim, value_dim: channels of one key and one value; 0 of a layer without attention.
    """

    policy: Policy
    shape: ModelShape
    slots: int | None
    rungs: Rungs | None
    offset: int
    cost: Cost
    key_dim: int
    value_dim: int

    @property
    def target(self) -> int | None:
        """Tokens left after a compaction, at most."""
        return None if self.slots is None else self.slots - self.policy.interval

    @cached_property
    def clock(self) -> Clock:
        """When the layer is compacted."""
        p = self.policy
        return Clock(p.interval if p.compacts else None, p.trigger)

    @cached_property
    def evictions(self) -> Evictions:
        """What a compaction drops; a ladder spares so many new slots that a whole one fits."""
        p = self.policy
        spared = _spared(p.recent_window, self.rungs)
        return Evictions(self.target, p.sinks, spared, self.rungs, self.offset)

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
        slots: most tokens of each layer, or None.
        rungs: integers of the ladder, or None.
        costs: bytes of each layer.
    """

    policy: Policy
    shape: ModelShape
    slots: tuple[int | None, ...]
    rungs: Rungs | None
    costs: tuple[Cost, ...]

    @cached_property
    def layers(self) -> tuple[LayerLayout, ...]:
        """One by one; a search that only asks for bytes never needs them."""
        p, r = self.policy, self.rungs
        order = p.ladder.order if p.ladder is not None else "modular"
        return tuple(
            LayerLayout(p, self.shape, n, r, offset(i, r, order) if r else 0, cost, *widths)
            for i, (n, cost, widths) in enumerate(
                zip(self.slots, self.costs, self.shape.per_layer, strict=True)
            )
        )

    @cached_property
    def _distinct(self) -> list[tuple[LayerLayout, int]]:
        """Layers with the same byte history, and how many there are of each."""
        groups: dict[tuple[Cost, int | None], tuple[LayerLayout, int]] = {}
        for layer in self.layers:
            first, count = groups.get((layer.cost, layer.slots), (layer, 0))
            groups[layer.cost, layer.slots] = (first, count + 1)
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
        layers = Counter(zip(self.costs, self.slots, strict=True))
        if (peak := stream_peak(self.policy, layers, self.rungs, tokens)) is not None:
            return peak
        limit = self.horizon()
        if limit is not None and self.rungs is None and tokens >= limit + start:
            c = (
                self.policy.interval
            )  # every layer is full, and a compaction leaves exactly its target
            return sum(n * layer.bytes(layer.target or 0, c) for layer, n in self._distinct)
        if limit is not None:
            tokens = min(tokens, limit + start)
        totals: dict[
            int, int
        ] = {}  # bytes just before each compaction; compactions are common to all layers
        for layer, count in self._distinct:
            for i, (compacted, residual) in enumerate(layer.intervals(tokens, start)):
                prompt_call = start > 0 and i == 0
                held = (layer.evictions.left(residual), 0) if prompt_call else (compacted, residual)
                totals[i] = totals.get(i, 0) + count * layer.bytes(*held)
        return max(totals.values())

    def bytes_mean(self, tokens: int, prompt: int = 0) -> float:
        """Bytes per sequence averaged over the steps of a stream of `tokens`."""
        start = prompt if self.policy.trigger != "stream" else 0
        total = 0
        for layer, count in self._distinct:
            slope = layer.bytes(0, 1) - layer.bytes(0, 0)
            for i, (compacted, m) in enumerate(layer.intervals(tokens, start)):
                if start and i == 0:
                    continue
                total += count * (m * layer.bytes(compacted, 0) + slope * m * (m + 1) // 2)
        return total / max(1, tokens - start)

    def bytes_at(self, seen: int, prompt: int = 0) -> int:
        """Bytes per sequence right after the `seen`-th token was processed."""
        start = prompt if self.policy.trigger != "stream" else 0
        total = 0
        for layer, count in self._distinct:
            compacted, residual = 0, 0
            for compacted, residual in layer.intervals(seen, start):  # noqa: B007 - the last one counts
                pass
            if layer.clock.due(seen, start):
                compacted, residual = layer.evictions.left(compacted + residual), 0
            total += count * layer.bytes(compacted, residual)
        return total


def _spared(recent_window: int, rung: Rungs | None) -> int:
    return recent_window if rung is None else max(recent_window, rung.R - 1)


def _floor(policy: Policy, rung: Rungs | None, recent_window: int) -> int:
    """Fewest slots with which one layer can run the policy."""
    kept = policy.sinks + _spared(recent_window, rung)
    if policy.quantizes and policy.quantizer.along == "tokens":
        kept += policy.interval  # a group is never cut before all of it has been quantised
    if rung is not None:
        return kept + rung.A + policy.interval
    return max(kept, policy.sinks + 1) + policy.interval


def _share_out(weights: list[float], total: int, floor: int) -> list[int]:
    """Integers at least `floor`, summing to `total`, in proportion to `weights` above the floor."""
    n = len(weights)
    fixed: set[int] = set()
    free = list(range(n))
    while True:
        room = total - floor * len(fixed)
        scale = room / sum([weights[i] for i in free]) if free else 0.0
        low = [i for i in free if weights[i] * scale < floor]
        if not low:
            break
        fixed.update(low)
        free = [i for i in free if i not in fixed]
    exact = [floor if i in fixed else weights[i] * scale for i in range(n)]
    out = [int(x) for x in exact]
    by_rest = sorted(range(n), key=lambda i: (out[i] - exact[i], i))
    for i in by_rest[: total - sum(out)]:
        out[i] += 1
    return out


@lru_cache(maxsize=256)
def _weights(budgets: Budgets, layers: int) -> list[float]:
    """Share of the slots per layer, in any unit."""
    if budgets.kind == "pyramid":
        top, bottom = 2 - 1 / budgets.beta, 1 / budgets.beta
        return [top + (bottom - top) * i / max(1, layers - 1) for i in range(layers)]
    return [w**budgets.exponent for w in budgets.weights]


def _rung(policy: Policy, shape: ModelShape) -> Rungs | None:
    """Integers of the policy's ladder, if it has one."""
    ladder = policy.ladder
    return None if ladder is None else rungs(shape.layers, ladder.span, ladder.overlap)


def _per_layer(
    policy: Policy, shape: ModelShape, rung: Rungs | None, slots: int | None, recent_window: int
) -> tuple[int, ...] | tuple[None, ...]:
    """Slots of each layer, of `policy` with so many slots and such a recent window."""
    if slots is None:
        return (None,) * shape.layers
    floor = _floor(policy, rung, recent_window)
    if slots < floor:
        parts = f"{policy.sinks} sinks + {recent_window} recent tokens + interval {policy.interval}"
        if rung is not None:
            parts += f" + {rung.A} of a ladder"
        raise PolicyError(
            f"field slots: {slots} slots are fewer than the {floor} that {parts} need"
        )
    if policy.budgets.kind == "uniform":
        return (slots,) * shape.layers
    weights = _weights(policy.budgets, shape.layers)
    if policy.budgets.of == "rest":
        rest = _share_out(weights, (slots - floor) * shape.layers, 0)
        return tuple(floor + n for n in rest)
    return tuple(_share_out(weights, slots * shape.layers, floor))


def _make(policy: Policy, shape: ModelShape) -> Layout:
    rung = _rung(policy, shape)
    slots = _per_layer(policy, shape, rung, policy.slots, policy.recent_window)
    left = policy.channels.on(shape)
    return Layout(policy, left, slots, rung, costs(policy, left))


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


def least_slots(policy: Policy, shape: ModelShape, recent_window: int) -> int:
    """Fewest slots with which `policy` can run if its recent window has so many tokens."""
    return _floor(policy, _rung(policy, shape), recent_window)


def peak_of(
    policy: Policy, shape: ModelShape, costs: tuple[Cost, ...], slots: int | None,
    recent_window: int, tokens: int, prompt: int = 0,
) -> int:  # fmt: skip
    """Peak in bytes of `policy` with other slots and recent window, without building that policy.

    Args:
        policy: what runs.
        shape: of the model.
        costs: bytes of each layer, which do not depend on slots and recent window.
        slots: instead of its own.
        recent_window: instead of its own.
        tokens: length of the stream.
        prompt: tokens that one forward call brings in at its start.

    Raises:
        PolicyError: the slots cannot hold what the policy promises never to evict.
    """
    rung = _rung(policy, shape)
    per_layer = _per_layer(policy, shape, rung, slots, recent_window)
    peak = stream_peak(policy, Counter(zip(costs, per_layer, strict=True)), rung, tokens)
    if peak is not None:
        return peak
    there = policy.model_copy(update={"slots": slots, "recent_window": recent_window})
    return _make(there, shape).bytes_peak(tokens, prompt)
