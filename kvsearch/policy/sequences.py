"""What anchors do to one layer's slots, in integers: what is evicted when, and the bytes of a text.

Which tokens are anchors is known only with the text, so this part of the schedule, and the bytes
that follow from it, are functions of one flag a token. No torch.
"""

from copy import copy
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvsearch.policy.layout import LayerLayout, Layout
from kvsearch.policy.policy import Policy
from kvsearch.policy.schedule import NEVER, Ints

Flags = NDArray[np.bool_]


class Eviction(NamedTuple):
    """Which slots are evicted when a layer holds more than its target.

    Attributes:
        stays: slots that stay when the oldest ordinary tokens go first, then the oldest anchors.
        first, last: ordinary tokens that may go, as a range of slots; a rule may pick among them.
    """

    stays: Ints
    first: int
    last: int


class Sequences:
    """What the slots of a layer hold while anchors close sequences; the same in all of its heads.

    Under a rule heads keep different ordinary tokens of the open sequence. These are as many in
    every head and lie between the newest anchor and the recent window, so what a slot holds is the
    same; `tokens` then names the ones that would be there by age.

    Args:
        policy: what the layer does.
        prompt: tokens of the first call, where those are protected.

    Attributes:
        tokens: token of every slot, rising `[N]`.
        anchor: whether it is an anchor `[N]`.
        seen: tokens of the stream so far.
    """

    def __init__(self, policy: Policy, prompt: int = 0) -> None:
        assert policy.anchors is not None
        self._close, self._isolate = policy.anchors.close, policy.anchors.isolate
        self._kept = policy.anchors.kept(policy.sinks, prompt)
        self._recent = policy.recent_window
        self.tokens = np.empty(0, dtype=np.int64)
        self.anchor = np.empty(0, dtype=np.bool_)
        self.seen = 0
        self._last = -1  # the newest anchor

    def copy(self) -> "Sequences":
        """The same, to go on from; arrays are replaced and never written to."""
        return copy(self)

    def plain(self, flags: Flags) -> Flags:
        """Which of the next tokens are anchors `[M]`: none of those that are kept in any case."""
        return flags & ~self._safe(np.arange(self.seen, self.seen + len(flags)))

    def ahead(self, flags: Flags, most: int) -> int:
        """How many of the next tokens, at most `most`, come before slots are looked at again.

        That is up to the next anchor, or until a token of a closed sequence is no longer recent.
        """
        found = np.flatnonzero(self.plain(flags[:most]))
        many = int(found[0]) + 1 if found.size else most
        if self._close and self._recent:
            waiting = self.tokens[self._closed()]
            if waiting.size:
                many = min(many, int(waiting[0]) + self._recent + 1 - self.seen)
        return many

    def take(self, flags: Flags) -> None:
        """Hold the next tokens, of which some are anchors `[M]`."""
        new = np.arange(self.seen, self.seen + len(flags))
        flags = self.plain(flags)
        self.tokens, self.anchor = np.append(self.tokens, new), np.append(self.anchor, flags)
        self.seen += len(flags)
        if flags.any():
            self._last = int(new[flags][-1])

    def isolated(self, flags: Flags) -> Flags:
        """Which of the next tokens are blind to earlier anchors `[M]`."""
        return self.plain(flags) & self._isolate

    def hidden(self) -> Ints:
        """Slots that the newest token is blind to: earlier anchors, if it is one itself."""
        if not self._isolate or not self.anchor[-1]:
            return np.empty(0, dtype=np.int64)
        return np.flatnonzero(self.anchor[:-1])

    def kept_at_end(self) -> Ints | None:
        """Slots that stay now that the newest token has attended, or None if all do."""
        if not self._close:
            return None
        gone = self._closed() & (self.tokens < self.seen - self._recent)
        return np.flatnonzero(~gone) if gone.any() else None

    def eviction(self, target: int) -> Eviction:
        """Which slots are evicted so that `target` are left."""
        free = ~self._safe(self.tokens) & (self.tokens < self.seen - self._recent)
        ordinary, anchors = (np.flatnonzero(free & x) for x in (~self.anchor, self.anchor))
        gone = np.concatenate([ordinary, anchors])[: len(self.tokens) - target]
        stays = np.delete(np.arange(len(self.tokens)), gone)
        first = int(ordinary[0]) if ordinary.size else 0
        return Eviction(stays, first, first + ordinary.size)

    def keep(self, slots: Ints) -> None:
        """Hold only these slots."""
        self.tokens, self.anchor = self.tokens[slots], self.anchor[slots]

    def _closed(self) -> Flags:
        """Slots of ordinary tokens whose sequence has ended, those still recent included."""
        return ~self.anchor & (self.tokens < self._last) & ~self._safe(self.tokens)

    def _safe(self, tokens: Ints) -> Flags:
        """Which tokens are never dropped, wherever they are."""
        sinks, protected = self._kept
        safe: Flags = tokens < sinks.stop
        if protected:
            safe |= (tokens >= protected.start) & (tokens < protected.stop)
        return safe


class Span(NamedTuple):
    """Tokens that come without a slot leaving or changing its tier.

    Attributes:
        many: how many.
        compacted, residual: held before them, as in `LayerLayout.bytes`.
    """

    many: int
    compacted: int
    residual: int


@dataclass(frozen=True, eq=False)
class Course:
    """A text's way through one layer, by age.

    Attributes:
        death: first query that no longer sees each token `[T]`.
        isolates: which queries are blind to earlier anchors, being anchors themselves `[T]`.
        compactions: tokens seen at each of them, those of anchors included, rising.
        spans: what comes between them.
        end: what is held after the text.
        left: compacted and residual tokens held after the text.
    """

    death: Ints
    isolates: Flags
    compactions: Ints
    spans: tuple[Span, ...]
    end: Sequences
    left: tuple[int, int]


def course(layer: LayerLayout, flags: Flags, prompt: int = 0) -> Course:
    """Follow a text through a layer that ranks by age, or whose heads hold as many slots as that.

    Args:
        layer: integers of the layer.
        flags: which tokens are anchors `[T]`.
        prompt: tokens that the first call brings in.
    """
    T, held = len(flags), Sequences(layer.policy, prompt)
    isolates = held.isolated(flags)
    death = np.full(T, NEVER, dtype=np.int64)
    spans: list[Span] = []
    compactions: list[int] = []
    seen = compacted = residual = 0
    while seen < T:
        due = layer.clock.after(seen, prompt)
        most = T - seen if due is None else min(due, T) - seen
        many = held.ahead(flags[seen:], most)
        held.take(flags[seen : seen + many])
        spans.append(Span(many, compacted, residual))
        seen, residual = seen + many, residual + many
        closed = held.kept_at_end()
        if closed is not None:
            death[np.delete(held.tokens, closed)] = seen
            held.keep(closed)
        if seen == due and layer.target is not None and len(held.tokens) > layer.target:
            stays = held.eviction(layer.target).stays
            death[np.delete(held.tokens, stays)] = seen
            held.keep(stays)
        if seen == due or closed is not None:
            compacted, residual = len(held.tokens), 0
            compactions.append(seen)
    ends = np.array(compactions, dtype=np.int64)
    return Course(death, isolates, ends, tuple(spans), held, (compacted, residual))


class TextBytes(NamedTuple):
    """Bytes per sequence of one text: the most at any step, the mean over steps, and at the end.

    A prompt that is compacted once it is whole counts from then on, see `Layout.bytes_peak`.
    """

    peak: int
    mean: float
    end: int


def text_bytes(sizes: Layout, flags: Flags, prompt: int = 0) -> TextBytes:
    """Exact bytes of a policy with anchors on a text; `Layout` knows their ceiling without one.

    Args:
        sizes: of the policy on the model.
        flags: which tokens are anchors `[T]`.
        prompt: tokens that the first call brings in.
    """
    steps, end = np.zeros(len(flags), dtype=np.int64), 0
    courses: dict[int | None, Course] = {}
    for layer, count in sizes.distinct:
        if layer.slots not in courses:
            courses[layer.slots] = course(layer, flags, prompt)
        at, found = 0, courses[layer.slots]
        slope = layer.bytes(0, 1) - layer.bytes(0, 0)
        for many, compacted, residual in found.spans:
            more = slope * np.arange(1, many + 1)
            steps[at : at + many] += count * (layer.bytes(compacted, residual) + more)
            at += many
        end += count * layer.bytes(*found.left)
    steps = steps[prompt if sizes.policy.trigger != "stream" else 0 :]
    return TextBytes(int(steps.max(initial=end)), float(steps.mean()) if steps.size else end, end)
