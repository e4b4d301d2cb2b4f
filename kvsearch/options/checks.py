"""Options as callers give them, in one form, and ranges; each is refused in one sentence."""

from collections.abc import Callable, Collection, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kvsearch.errors import KvsearchError, ModelError, TextError, nearest, quoted
from kvsearch.workloads.text import Text, TextLike

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


def paths(given: str | PathLike[str] | Sequence[str | PathLike[str]]) -> tuple[Path, ...]:
    """One path or several."""
    return tuple(map(Path, several(given)))


def path(given: str | PathLike[str] | None) -> Path | None:
    """A path, or None."""
    return None if given is None else Path(given)


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


def within(test: Callable[[Any], bool], told: str) -> Callable[[str, Any], None]:
    """A range, and what a value in it is."""

    def check(option: str, value: Any) -> None:
        try:
            inside = test(value)
        except TypeError:  # of another type
            inside = False
        if not inside:
            got = f"{value:g}" if isinstance(value, float) else quoted(value)
            raise KvsearchError(f"{option} must be {told}, got {got}")

    return check


def at_least(least: int, unit: str = "") -> Callable[[str, Any], None]:
    """The range from `least` on."""
    return within(lambda value: value >= least, f"at least {least}{unit}")


def one_of(words: Collection[str]) -> Callable[[str, Any], None]:
    """One of these words."""
    return within(lambda value: value in words, f"one of {', '.join(words)}")


def known(what: str, words: Collection[str]) -> Callable[[str, Any], None]:
    """One of these names of a `what`."""

    def check(_: str, value: Any) -> None:
        if value not in words:
            raise KvsearchError(f"unknown {what} {quoted(value)}{nearest(value, words)}")

    return check
