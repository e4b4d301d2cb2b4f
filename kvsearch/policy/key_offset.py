"""A fixed vector of each KV head, subtracted from its keys before they are stored, and scales.

Where most of a key's energy is the same in all keys, low bits are spent on what every key has in
common. A query's product with a fixed vector is the same for all slots of a head, so softmax does
not see that it is gone: nothing is added back. What a channel of keys is divided by, the query's
channel is multiplied by: products are the same, and rounding errors go where they matter less.
Both happen once, when tokens come; decoding costs no more.
"""

from base64 import b64decode, b64encode
from collections.abc import Sequence
from functools import cached_property, lru_cache
from hashlib import sha256
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field

from kvsearch.errors import PolicyError
from kvsearch.frozen import Frozen
from kvsearch.policy.shape import ModelShape

ALIKE = 0.9  # share of a sample that is equal in one model, whatever types it was rounded to before


def _numbers(word: str) -> str:
    if not np.isfinite(numbers(word)).all():
        raise ValueError("an offset has a number that is not finite")
    return word


def _positive(word: str) -> str:
    if not (numbers(word) > 0).all():
        raise ValueError("a scale must be above 0")
    return word


Numbers = Annotated[str, AfterValidator(_numbers)]
Positive = Annotated[Numbers, AfterValidator(_positive)]


class Offset(Frozen):
    """What is subtracted, and of which model it was measured.

    Numbers are words: base64 of float16, least byte first.

    Attributes:
        keys: one word a layer: a vector for each KV head, `[H, D]`, of keys as attention gets them.
        scales: likewise, what channels of keys are divided by after that; none are all 1.
        sample: some weights of the model that was measured, see `kvsearch.models.sample`; empty
            where they cannot be read.
    """

    keys: tuple[Numbers, ...] = Field(min_length=1)
    scales: tuple[Positive, ...] = ()
    sample: Numbers

    @cached_property
    def digest(self) -> str:
        """Sixteen hex digits over the vectors."""
        return sha256(" ".join((*self.keys, *self.scales)).encode()).hexdigest()[:16]

    @property
    def vectors(self) -> int:
        """How many a KV head has."""
        return 2 if self.scales else 1

    def heads(self, layer: int, heads: int) -> NDArray[np.float16]:
        """The vectors of a layer's KV heads `[H, 1, D]`, or with scales `[H, 2, D]`."""
        each = (self.keys, self.scales)[: self.vectors]
        return np.stack([numbers(x[layer]).reshape(heads, -1) for x in each], 1)

    def check(self, shape: ModelShape) -> None:
        """Raise a `PolicyError` if the vectors are not those of a model of this shape."""
        for name, words in (("keys", self.keys), ("scales", self.scales)):
            where = f"field quantizer.offset.{name}"
            if name == "scales" and not words:
                continue
            if len(words) != shape.layers:
                raise PolicyError(
                    f"{where}: {len(words)} layers for a model with {shape.layers}; the policy was "
                    "made for another shape"
                )
            for i, (each, (width, _)) in enumerate(zip(words, shape.per_layer, strict=True)):
                wanted = shape.kv_heads * width
                if (n := numbers(each).size) != wanted:
                    raise PolicyError(
                        f"{where}: {n} numbers in layer {i} of a model whose keys have {wanted}; "
                        "the policy was made for another shape"
                    )

    def check_model(self, sample: NDArray[np.float16] | None) -> None:
        """Raise a `PolicyError` if a model's sample is of other weights than those measured."""
        mine = numbers(self.sample)
        if sample is None or not mine.size:
            return
        if mine.shape != sample.shape or np.mean(mine == sample) < ALIKE:
            raise PolicyError(
                "field quantizer.offset: it was measured on other weights than this model's; "
                "search again with this model, or remove quantizer.offset from the policy"
            )


def word(numbers: Sequence[float] | NDArray[np.floating]) -> str:
    """Numbers as a policy file has them."""
    return b64encode(np.asarray(numbers, dtype="<f2").tobytes()).decode()


@lru_cache(maxsize=4096)
def numbers(word: str) -> NDArray[np.float16]:
    """What `word` encoded, `[N]`.

    Raises:
        ValueError: it is something else.
    """
    try:
        found = np.frombuffer(b64decode(word, validate=True), dtype="<f2").astype(np.float16)
    except ValueError as e:
        raise ValueError("an offset is base64 of float16 numbers") from e
    found.flags.writeable = False
    return found
