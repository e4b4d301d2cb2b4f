"""Which channels of keys and values a layer keeps, for every token alike (KVPruner).

The policy names the channels themselves, not the score that chose them: a file then means the same
in every dtype and after the weights were trained on, and a choice that took gradients needs no
text to run. A channel goes from queries and keys together, or from values and outputs together.
"""

from functools import lru_cache
from typing import Annotated

from pydantic import Field

from kvsearch.errors import PolicyError
from kvsearch.frozen import Frozen
from kvsearch.policy.shape import ModelShape

ALL, NONE = "all", "none"
Kept = tuple[tuple[int, ...], ...]  # per KV head, rising
Word = Annotated[str, Field(pattern=r"^(all|none|[0-9a-f]+( [0-9a-f]+)*)$")]


class Channels(Frozen):
    """Kept channels, one word a layer; no words keep everything.

    A word is `all`; `none`, for a layer whose attention is removed, which contributes nothing and
    stores nothing; or a hexadecimal mask per KV head, whose lowest bit is the first channel. The
    heads of a layer keep as many channels each. Softmax scales stay those of whole heads.

    Attributes:
        qk: rotary pairs of queries and keys: pair c is the channels c and c + D/2 of a head.
        vo: channels of values, and of the output projection's input.
    """

    qk: tuple[Word, ...] = ()
    vo: tuple[Word, ...] = ()

    @property
    def active(self) -> bool:
        """Whether anything is removed."""
        return any(word != ALL for word in (*self.qk, *self.vo))

    def word(self, axis: str, layer: int) -> str:
        """What is kept of `qk` or `vo` in a layer."""
        words: tuple[str, ...] = getattr(self, axis)
        return words[layer] if words else ALL

    def removed(self, layer: int) -> bool:
        """Whether the layer has no attention."""
        return self.word("qk", layer) == NONE

    def pairs(self, layer: int) -> Kept | None:
        """Kept rotary pairs of every KV head, or None for all."""
        return kept_in(self.word("qk", layer))

    def values(self, layer: int) -> Kept | None:
        """Kept value channels of every KV head, or None for all."""
        return kept_in(self.word("vo", layer))

    def on(self, shape: ModelShape) -> ModelShape:
        """The shape of what is left of a model.

        Raises:
            PolicyError: the channels are of a model of another shape, or contradict themselves.
        """
        if not self.active:
            return shape
        if shape.widths:
            raise PolicyError("field channels: the model has had channels removed already")
        for axis in ("qk", "vo"):
            if (n := len(getattr(self, axis))) not in (0, shape.layers):
                raise PolicyError(
                    f"field channels.{axis}: {n} words for a model with {shape.layers} layers; the "
                    "policy was made for another shape"
                )
        if shape.head_dim % 2 and self.qk:
            raise PolicyError(f"field channels.qk: a head of {shape.head_dim} has no rotary pairs")
        if all(self.removed(i) for i in range(shape.layers)):
            raise PolicyError("field channels: no layer is left with attention")
        widths = []
        for i in range(shape.layers):
            if self.removed(i) != (self.word("vo", i) == NONE):
                raise PolicyError(
                    f"field channels: layer {i} is removed from one of qk and vo; a layer loses "
                    "its attention from both"
                )
            pairs = _count("qk", i, self.word("qk", i), shape.kv_heads, shape.head_dim // 2)
            values = _count("vo", i, self.word("vo", i), shape.kv_heads, shape.head_dim)
            whole = self.word("qk", i) == ALL  # also of heads of an odd size
            widths.append((shape.head_dim if whole else 2 * pairs, values))
        return shape.with_widths(tuple(widths))


def mask(kept: tuple[int, ...]) -> str:
    """The word of one head that keeps the channels `kept`."""
    return f"{sum(1 << c for c in kept):x}"


@lru_cache(maxsize=4096)
def kept_in(word: str) -> Kept | None:
    """Channels of every head in a word; None for all of them, nothing for a removed layer."""
    if word == ALL:
        return None
    heads = () if word == NONE else word.split()
    return tuple(
        tuple(c for c in range(bits.bit_length()) if bits >> c & 1)
        for bits in (int(head, 16) for head in heads)
    )


def _count(axis: str, layer: int, word: str, heads: int, channels: int) -> int:
    """How many channels each head keeps."""
    kept = kept_in(word)
    if kept is None or word == NONE:
        return channels if kept is None else 0
    where = f"field channels.{axis}: layer {layer}"
    if len(kept) != heads:
        raise PolicyError(f"{where} has masks of {len(kept)} heads, and the model has {heads}")
    if max(max(head, default=0) for head in kept) >= channels:
        raise PolicyError(f"{where} keeps a channel beyond the {channels} that a head has")
    counts = {len(head) for head in kept}
    if len(counts) > 1:
        raise PolicyError(
            f"{where} keeps between {min(counts)} and {max(counts)} channels of a head; heads of a "
            "layer keep as many each"
        )
    if counts == {0}:
        raise PolicyError(
            f"{where} keeps no channel of a head; a layer without attention is '{NONE}' in both "
            "qk and vo"
        )
    return counts.pop()
