"""Anchors: from knobs to the part of a policy."""

from collections.abc import Mapping
from typing import Any

from kvsearch.policy import Anchors


def anchors_of(get: Mapping[str, Any]) -> Anchors | None:
    """The anchors that the knobs `anchors` and `anchors.*` describe; None without any.

    Endpoints (`ep`) are tokens that end in one of the marks, new tokens (`ac`) come between
    sentences; `anchors.every` puts either every so many tokens.
    """
    if get["anchors"] == "none":
        return None
    new, every = get["anchors"] == "ac", int(get["anchors.every"])
    return Anchors(
        at=every or ("sentences" if new else "marks"),
        marks=tuple(str(get["anchors.marks"])),
        insert=new,
        embedding=get["anchors.embedding"],
        close=get["anchors.close"],
        isolate=get["anchors.isolate"],
    )
