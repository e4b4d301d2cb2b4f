"""Arguments as callers give them, in one form; each is refused in one sentence if it is none."""

import os
from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING, TypeVar

from kvsearch.errors import KvsearchError, ModelError, TextError, quoted
from kvsearch.text import Text, TextLike
from kvsearch.workloads import SEES

if TYPE_CHECKING:
    from kvsearch.models.load import LoadedModel

Place = TypeVar("Place", str, str | PathLike[str])


def texts(given: TextLike | Sequence[TextLike] | None) -> tuple[TextLike, ...]:
    """One text or several, as a caller gave them."""
    if given is None:
        return ()
    found = (given,) if isinstance(given, str | PathLike | Text) else given
    if not isinstance(found, Sequence) or isinstance(found, bytes | bytearray):
        found = (given,)  # refused below, as what is in a sequence
    for spec in found:
        if not isinstance(spec, str | PathLike | Text):
            raise TextError(
                f"a text is a path, kvsearch.Text(...) for the text itself, or several of these, "
                f"not {quoted(spec)} of type {type(spec).__name__}"
            )
    return tuple(found)


def names(given: str | Sequence[str]) -> tuple[str, ...]:
    """Words with commas between them, or a sequence of words."""
    return tuple(given.split(",")) if isinstance(given, str) else tuple(given)


def several(given: Place | Sequence[Place]) -> tuple[Place, ...]:
    """One name or path, or several."""
    return (given,) if isinstance(given, str | PathLike) else tuple(given)


def which(given: "str | PathLike[str] | LoadedModel") -> "str | LoadedModel":
    """A model as a caller gave it: a loaded one, or a name.

    Raises:
        ModelError: it is neither.
    """
    if isinstance(given, str | PathLike):
        return str(given)
    from kvsearch.models.load import LoadedModel  # imports torch

    if isinstance(given, LoadedModel):
        return given
    raise ModelError(
        f"a model is a name, a path or a LoadedModel, not a {type(given).__name__}; give "
        "LoadedModel.of(model, tokenizer)"
    )


def check_counts(**given: int | None) -> None:
    """Raise a `KvsearchError` for an option that was given and is below 1; None is not given."""
    for name, value in given.items():
        if value is not None and value < 1:
            raise KvsearchError(f"--{name.replace('_', '-')} must be at least 1, got {value}")


def check_see(see: str) -> None:
    """Raise a `KvsearchError` for another word than those of `--see`."""
    if see not in SEES:
        raise KvsearchError(f"--see must be one of {', '.join(SEES)}, got {quoted(see)}")


def check_workers(count: int) -> None:
    """Raise a `KvsearchError` for more processes than this machine can have a use for."""
    cores = os.cpu_count() or 1
    if count > (most := max(8, 4 * cores)):
        raise KvsearchError(
            f"--workers {count} are more processes than the {cores} cores of this machine can run; "
            f"give at most {most}"
        )


def check_batch(batch: int | None) -> None:
    """Raise a `KvsearchError` for less than one window a forward pass."""
    if batch is not None and batch < 1:
        raise KvsearchError(f"--batch must be at least 1 window, got {batch}")
