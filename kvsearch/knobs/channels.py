"""Removed channels: from knobs, and from what was measured of a model, to the part of a policy."""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, cast

from kvsearch.knobs.vocabulary import KNOBS
from kvsearch.policy import Channels, ModelShape
from kvsearch.policy.pruning import BY_HARM, WHOLE, Importance, Law, channels
from kvsearch_kernels.codebooks import CODEBOOKS

NOTHING = Importance()
DEFAULT_SCORE = KNOBS["channels.score"].default
PACKED = 16  # channels that a head keeps a multiple of, where they are quantised in groups


def channels_of(
    get: Mapping[str, Any], importance: Importance | None, shape: ModelShape
) -> Channels:
    """The channels that the knobs `channels` and `channels.*` leave of a model.

    Args:
        get: a value for every knob.
        importance: what was measured of the channels; None if nothing was.
        shape: of the model.

    Raises:
        PolicyError: nothing of a head would stay, or what the knobs need was not measured.
    """
    law = str(get["channels"])
    if law == "none":
        return Channels()
    qk = None if get["channels.qk"] == "coupled" else float(get["channels.qk"])
    multiple = 2
    if get["tiers"] != "16":
        step = CODEBOOKS[str(get["levels"])].group or PACKED
        multiple = step if shape.head_dim % step == 0 and shape.head_dim > step else 8
    ratio, score = float(get["channels.ratio"]), str(get["channels.score"])
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
        found |= {str(v) for v in values.get("channels.score", (DEFAULT_SCORE,))}
    return frozenset(found)
