"""Removed channels: from knobs, and from what was measured of a model, to the part of a policy."""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import cast

from kvsearch.policy import Channels, ModelShape
from kvsearch.policy.pruning import BY_RISE, WHOLE, Importance, Law, channels
from kvsearch.policy_space.axes import Value

NOTHING = Importance()
PACKED = 16  # channels that a head keeps a multiple of, where they are quantised in groups
COUPLED = "coupled"  # one set of channels for queries, keys, values and outputs
FIELDS: dict[str, Value] = {"ratio": 0.2, "score": "l2", "qk": COUPLED}
TEMPERATURE: dict[str, Value] = {"temperature": 1.0}  # of equation 1


def spelled(law: str) -> dict[str, Value]:
    """A law by its numbers: what its dotted knobs are where nothing names them."""
    if law in WHOLE:
        return {"ratio": FIELDS["ratio"]}
    if law == "eq1":
        return {**FIELDS, **TEMPERATURE}
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
    fields = {**FIELDS, **TEMPERATURE, **changes}
    qk = None if fields["qk"] == COUPLED else float(fields["qk"])
    multiple = 2
    if packed is not None:
        multiple = packed if shape.head_dim % packed == 0 and shape.head_dim > packed else 8
    ratio, score = float(fields["ratio"]), str(fields["score"])
    temperature = float(fields["temperature"])
    return _channels(law, ratio, importance or NOTHING, shape, score, qk, temperature, multiple)


@lru_cache(maxsize=1024)
def _channels(
    law: str, ratio: float, importance: Importance, shape: ModelShape, score: str,
    qk: float | None, temperature: float, multiple: int,
) -> Channels:  # fmt: skip
    """Chosen once, since a search asks for the same few again and again."""
    return channels(
        cast(Law, law), ratio, importance, shape,
        score=score, qk=qk, temperature=temperature, multiple=multiple,
    )  # fmt: skip


def needs(values: Mapping[str, Iterable[object]]) -> frozenset[str]:
    """What has to be measured before policies with such values of their knobs can be built.

    `ppl_rise` is the rise in perplexity without each layer; the others are scores of the channels.
    """
    laws = {str(v) for v in values.get("channels", ())} - {"none"}
    found = {"ppl_rise"} if laws.intersection(BY_RISE) else set()
    if laws.difference(WHOLE):
        found |= {str(v) for v in values.get("channels.score", (FIELDS["score"],))}
    return frozenset(found)
