"""Removed channels: from knobs, and from what was measured of a model, to the part of a policy."""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import cast

from kvsearch.knobs.vocabulary import Value
from kvsearch.policy import Channels, ModelShape
from kvsearch.policy.pruning import BY_HARM, WHOLE, Importance, Law, channels

NOTHING = Importance()
PACKED = 16  # channels that a head keeps a multiple of, where they are quantised in groups
COUPLED = "coupled"  # one set of channels for queries, keys, values and outputs
FIELDS: dict[str, Value] = {"ratio": 0.2, "score": "l2", "qk": COUPLED}


def spelled(law: str) -> dict[str, Value]:
    """A law by its numbers: what its dotted knobs are where nothing names them."""
    if law in WHOLE:
        return {"ratio": FIELDS["ratio"]}
    return {} if law == "none" else FIELDS


def channels_of(
    law: str,
    changes: Mapping[str, Value],
    importance: Importance | None,
    shape: ModelShape,
    packed: int | None,
) -> Channels:
    """The channels that the knobs `channels` and `channels.*` leave of a model.

    Args:
        law: value of `channels`.
        changes: fields of the law that dotted knobs name.
        importance: what was measured of the channels; None if nothing was.
        shape: of the model.
        packed: channels that share a scale, at least; None where nothing is quantised.

    Raises:
        PolicyError: nothing of a head would stay, or what the knobs need was not measured.
    """
    if law == "none":
        return Channels()
    fields = {**FIELDS, **changes}
    qk = None if fields["qk"] == COUPLED else float(fields["qk"])
    multiple = 2
    if packed is not None:
        multiple = packed if shape.head_dim % packed == 0 and shape.head_dim > packed else 8
    ratio, score = float(fields["ratio"]), str(fields["score"])
    return _channels(law, ratio, importance or NOTHING, shape, score, qk, multiple)


@lru_cache(maxsize=1024)
def _channels(
    law: str, ratio: float, importance: Importance, shape: ModelShape, score: str,
    qk: float | None, multiple: int,
) -> Channels:  # fmt: skip
    """Chosen once, since a search asks for the same few again and again."""
    return channels(cast(Law, law), ratio, importance, shape, score=score, qk=qk, multiple=multiple)


def needs(values: Mapping[str, Iterable[object]]) -> frozenset[str]:
    """What has to be measured before policies with such values of their knobs can be built.

    `harm` is that of each layer; the others are scores of the channels.
    """
    laws = {str(v) for v in values.get("channels", ())} - {"none"}
    found = {"harm"} if laws.intersection(BY_HARM) else set()
    if laws.difference(WHOLE):
        found |= {str(v) for v in values.get("channels.score", (FIELDS["score"],))}
    return frozenset(found)
