"""A fixed vector of each KV head, subtracted from its keys before they are stored.

Where most of a key's energy is the same in all keys, low bits are spent on what every key has in
common. A query's product with a fixed vector is the same for all slots of a head, so softmax does
not see that it is gone: nothing is added back, and decoding costs nothing.
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


Numbers = Annotated[str, AfterValidator(_numbers)]


class Offset(Frozen):
    """What is subtracted, and of which model it was measured.

    Numbers are words: base64 of float16, least byte first.

    Attributes:
        keys: one word a layer: a vector for each KV head, `[H, D]`, of keys as attention gets them.
        sample: some weights of the model that was measured, see `kvsearch.models.sample`; empty
            where they cannot be read.
    """

    keys: tuple[Numbers, ...] = Field(min_length=1)
    sample: Numbers

    @cached_property
    def digest(self) -> str:
        """Sixteen hex digits over the vectors."""
        return sha256(" ".join(self.keys).encode()).hexdigest()[:16]

    def heads(self, layer: int, heads: int) -> NDArray[np.float16]:
        """The vectors of a layer's KV heads `[H, D]`."""
        return numbers(self.keys[layer]).reshape(heads, -1)

    def check(self, shape: ModelShape) -> None:
        """Raise a `PolicyError` if the vectors are not those of a model of this shape."""
        where = "field quantizer.offset.keys"
        if len(self.keys) != shape.layers:
            raise PolicyError(
                f"{where}: {len(self.keys)} layers for a model with {shape.layers}; the policy was "
                "made for another shape"
            )
        for i, (each, (width, _)) in enumerate(zip(self.keys, shape.per_layer, strict=True)):
            wanted = shape.kv_heads * width
            if (n := numbers(each).size) != wanted:
                raise PolicyError(
                    f"{where}: {n} numbers in layer {i} of a model whose keys have {wanted}; the "
                    "policy was made for another shape"
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
