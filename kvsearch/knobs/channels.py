"""Removed channels: from knobs, and from what was measured of a model, to the part of a policy."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, cast

from kvsearch.policy import Channels, ModelShape
from kvsearch.policy.pruning import BY_HARM, WHOLE, Importance, Law, channels

NOTHING = Importance()
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
        multiple = PACKED if shape.head_dim % PACKED == 0 and shape.head_dim > PACKED else 8
    ratio, score = float(get["channels.ratio"]), str(get["channels.score"])
    return _channels(law, ratio, importance or NOTHING, shape, score, qk, multiple)


@lru_cache(maxsize=1024)
def _channels(
    law: str, ratio: float, importance: Importance, shape: ModelShape, score: str,
    qk: float | None, multiple: int,
) -> Channels:  # fmt: skip
    """Chosen once, since a search asks for the same few again and again."""
    return channels(cast(Law, law), ratio, importance, shape, score=score, qk=qk, multiple=multiple)


def needs_harm(knobs: Mapping[str, Any]) -> bool:
    """Whether a method or point needs the harm of each layer to be measured."""
    return knobs.get("channels") in BY_HARM


def needs_score(knobs: Mapping[str, Any], default: str) -> str | None:
    """The score by which a method or point ranks channels, or None if it ranks none."""
    if knobs.get("channels", "none") in ("none", *WHOLE):
        return None
    return str(knobs.get("channels.score", default))
