"""What one layer's cache costs: tier counts and bytes as closed formulas, and their peak.

A search prices thousands of policies, so everything that does not depend on the number of tokens
is worked out once per policy.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from kvsearch.policy.ladder import Rungs
from kvsearch.policy.policy import Policy
from kvsearch.policy.shape import ModelShape
from kvsearch_kernels.codebooks import Codebook

TAG_BYTES = 1  # uint8 tier index

ENDLESS = 1 << 40  # slots of a layer that never evicts
FEW = 12  # pairs of a layer and a step, up to which a loop is faster than arrays


class Cost:
    """Bytes of one layer of one policy on one model shape, as a function of what it holds.

    Args:
        policy: what runs.
        shape: of the model.
        widths: channels of one key and one value of the layer, if not those of a whole head; a
            layer of (0, 0) holds nothing.

    Attributes:
        rising: a token more never makes a layer smaller (a tiny `group` may make 8 bits dearer
            than 16, and then a better tier is the cheaper one).
    """

    def __init__(
        self, policy: Policy, shape: ModelShape, widths: tuple[int, int] | None = None
    ) -> None:
        H, q = shape.kv_heads, policy.quantizer
        K, V = widths or (shape.head_dim, shape.head_dim)
        self._native = policy.fp16_sinks + policy.fp16_recent  # tokens in no tier
        self._residual = 2 * (K + V) * H
        k, v = q.books
        self._tiers = [
            H
            * (
                _vector_bytes(q.group, k, K, t.key_bits, q.along)
                + _vector_bytes(q.group, v, V, t.value_bits)
            )
            for t in policy.tiers
        ]
        self._group, self._group_bytes = 1, 0
        if q.along == "tokens" and q.group is not None and policy.tiers[0].key_bits < 16:
            self._group, self._group_bytes = q.group, H * K * k.numbers * 2
        self._shares = list(accumulate((t.share for t in policy.tiers[:-1]), initial=0.0))[1:]
        self._held = self._tag = self._layer = 0
        if (rule := policy.active_rule) is not None and K:
            self._held = rule.voters(H) * rule.slot_bytes(policy.interval)
            self._tag = rule.voters(H) * TAG_BYTES if policy.tagged else 0
            self._layer = rule.layer_bytes(shape.heads, H, K)
        if policy.offset is not None:
            self._layer += 2 * K * H * policy.offset.vectors
        self.rising = all(a >= b for a, b in pairwise(self._tiers))

    def tier_counts(self, n: int, target: int | None) -> tuple[int, ...]:
        """Tokens of each tier after a compaction left `n`, in a layer that is left `target`."""
        m = max(0, n - self._native)
        if not self._shares:
            return (m,)
        full = m if target is None else max(m, target - self._native)
        edges = [0, *(min(m, int(total * full + 0.5)) for total in self._shares), m]
        return tuple(b - a for a, b in pairwise(edges))

    def bytes(self, compacted: int, residual: int, target: int | None) -> int:
        """Bytes of `compacted` tokens in their tiers and `residual` newer ones in 16 bits."""
        native = min(compacted, self._native)
        held = compacted + residual
        total = (residual + native) * self._residual + held * self._held + compacted * self._tag
        total += self._layer + -(-(compacted - native) // self._group) * self._group_bytes
        if not self._shares:
            return total + (compacted - native) * self._tiers[0]
        counts = self.tier_counts(compacted, target)
        return total + sum(n * b for n, b in zip(counts, self._tiers, strict=True))

    def most(self, n: int, interval: int, target: int | None) -> int:
        """Most bytes of at most `n` tokens, of which at most `interval` are residual."""
        held = np.arange(n if self.rising else 0, n + 1, dtype=np.int64)[:, None]
        residual = np.minimum(np.arange(interval + 1, dtype=np.int64), held)
        full = np.array(target or 0, dtype=np.int64)  # without one, shares are of what is held
        return int(self.grid(held - residual, residual, full).max())

    def grid(
        self, compacted: NDArray[np.int64], residual: NDArray[np.int64], target: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """`bytes` of arrays that broadcast: many layers at many steps at once."""
        native = np.minimum(compacted, self._native)
        held = compacted + residual
        total = (residual + native) * self._residual + held * self._held + compacted * self._tag
        m, last = compacted - native, self._tiers[-1]
        total = total + self._layer + -(-m // self._group) * self._group_bytes
        full = np.maximum(m, target - self._native)
        for share, (better, worse) in zip(self._shares, pairwise(self._tiers), strict=True):
            total = total + np.minimum(m, (share * full + 0.5).astype(np.int64)) * (better - worse)
        out: NDArray[np.int64] = total + m * last
        return out


def _vector_bytes(
    group: int | None, book: Codebook, width: int, bits: int, along: str = "channels"
) -> int:
    """Bytes of one key or value of one head: codes, and what scales and zeros it has of its own."""
    if bits == 16:
        return 2 * width
    codes = width * bits // 8
    if along == "tokens" or not width:
        return codes
    return codes + width // (group or width) * book.numbers * 2


Held = Sequence[tuple[Cost, Mapping[int | None, int]]]  # layers alike in tiers: slots -> how many


def stream_peak(policy: Policy, held: Held, rung: Rungs | None, tokens: int) -> int | None:
    """Most bytes of all layers at any step of a stream, or None where the closed form fails.

    A layer that is compacted every `c` tokens holds `k c` tokens after `k` compactions until it is
    full, then the largest number at most its target that is congruent to `k c` modulo the `R` slots
    that a ladder frees. Moved `R` compactions on, every layer holds as much or more: the peak is
    among the last `R` whole intervals and the unfinished one.

    Args:
        policy: what runs; its slots are not read.
        held: costs, and with each the slots of the layers that it counts.
        rung: integers of its ladder.
        tokens: length of the stream, at least 1.
    """
    if policy.trigger != "stream" or not all(cost.rising for cost, _ in held) or tokens < 1:
        return None
    c = policy.interval if policy.compacts else tokens
    step = 1 if rung is None else rung.R
    whole, rest = divmod(tokens, c)
    last = [(k, c) for k in range(max(0, whole - step), whole)]
    if rest or policy.compacts:  # a compaction at the end may leave more bytes than it found
        last.append((whole, rest))
    if len(last) * sum(len(layers) for _, layers in held) <= FEW:
        return max(
            sum(
                count * cost.bytes(_held(k * c, slots, c, step), residual, _target(slots, c))
                for cost, layers in held
                for slots, count in layers.items()
            )
            for k, residual in last
        )
    k, residual = np.array(last, dtype=np.int64).T[:, :, None]
    total = np.zeros(len(last), dtype=np.int64)
    for cost, layers in held:
        compacted, target = k * c, np.array([(n or ENDLESS) - c for n in layers], dtype=np.int64)
        compacted = np.where(compacted > target, target - (target - compacted) % step, compacted)
        full = compacted if None in layers else target
        total += cost.grid(compacted, residual, full) @ np.array(list(layers.values()))
    return int(total.max())


def _target(slots: int | None, c: int) -> int | None:
    return None if slots is None else slots - c


def _held(seen: int, slots: int | None, c: int, step: int) -> int:
    """Tokens left after a compaction at `seen`, with a ladder that frees `step` at a time."""
    target = ENDLESS if slots is None else slots - c
    return seen if seen <= target else target - (target - seen) % step


def ceiling(policy: Policy, held: Held, tokens: int, prompt: int) -> int:
    """Most bytes of all layers after so many tokens, whatever anchors do and when.

    Anchors only make layers smaller or compact them at other times, so a layer never holds more
    tokens than without them, nor more residual ones; arguments are as for `stream_peak`.
    """
    late = policy.trigger == "prompt"  # one compaction, and then the cache grows
    c = max(0, tokens - prompt) if late else min(policy.interval, tokens)
    if not policy.compacts:
        c = tokens
    total = 0
    for cost, layers in held:
        for slots, count in layers.items():
            target = _target(slots, policy.interval)
            limit = tokens if slots is None else slots
            n = min(tokens, (target or 0) + c if late and target else limit)
            total += count * cost.most(n, min(c, n), target)
    return total
