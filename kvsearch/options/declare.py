"""What an option is: a field of a frozen dataclass, which callers may give in several forms."""

from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields
from os import PathLike
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Self, TypeVar, dataclass_transform

from kvsearch.errors import KvsearchError, nearest, quoted

G = TypeVar("G")
V = TypeVar("V")
T = TypeVar("T")
JOINED = ","  # between words that the command line takes as one
ALWAYS, CHANGED = "always", "changed"  # when an option is among the settings of study.json


class Given(Generic[G, V]):
    """Type of a field that callers give as a `G` and that is read as a `V`."""

    if TYPE_CHECKING:

        def __get__(self, config: object, kind: object) -> V: ...
        def __set__(self, config: object, given: G) -> None: ...


class Word(NamedTuple):
    """How a word of the command line, or a value of a YAML file, is read.

    Attributes:
        name: in the help.
        parse: raises a `ValueError` in words of its own.
        types: of values in a file.
        words: for these types.
        besides: a word that a file may have instead.
    """

    name: str
    parse: Callable[[Any], Any]
    types: tuple[type, ...]
    words: str
    besides: str = ""


def option(
    default: Any,
    told: str,
    convert: Callable[[Any], Any] | None = None,
    *,
    check: Callable[[str, Any], None] | None = None,
    **how: Any,
) -> Any:
    """A field of a config.

    Args:
        default: in Python, and on the command line without `shell`.
        told: the help of the command line, and the beginning of that in Python.
        convert: from what a caller may give to the value of the field.
        check: raises a `KvsearchError` for a value out of range; None is in every range.
        how: `flags`, the flags_of if not the name; `metavar`; `word`, a `Word`; `shell`, another
            default there; `group`, a heading of the help; `instead`, the option that it excludes;
            `python`, what is said in Python beyond the help; `required`, on the command line;
            `hidden`, which is for Python only; `recorded`, whether it makes a run another one as
            it is: `ALWAYS`, or `CHANGED`, where it is not the default.
    """
    return field(
        default=default, metadata={"help": told, "convert": convert, "check": check, **how}
    )


def again(kind: type["Config"], name: str, **changed: Any) -> Any:
    """The option of another config with another `default`, `help` or whatever `option` takes."""
    of = next(f for f in fields(kind) if f.name == name)
    default = changed.pop("default", of.default)
    return field(default=default, metadata={**of.metadata, **changed})


@dataclass_transform(kw_only_default=True)
def part(kind: type[T]) -> type[T]:
    """A frozen dataclass of options; each is a keyword.

    Configs inherit from several. The last base has the first options.
    """
    return dataclass(frozen=True, kw_only=True)(kind)


@dataclass_transform()
def ordered(kind: type[T]) -> type[T]:
    """The same; options above `_: KW_ONLY` may be given by their place."""
    return dataclass(frozen=True)(kind)


@part
class Config:
    """Values in the form that is declared, each in its range and none against another.

    Raises:
        KvsearchError: they are not.
    """

    progress: bool = option(False, "print progress to stderr", hidden=True)

    def __post_init__(self) -> None:
        for f in fields(self):
            value, how = getattr(self, f.name), f.metadata
            if how.get("convert") is not None:
                value = how["convert"](value)
                object.__setattr__(self, f.name, value)
            if value is not None and how.get("check") is not None:
                how["check"](flags_of(f)[0], value)
        self.check()

    def check(self) -> None:
        """Raise a `KvsearchError` for options that contradict each other."""

    def plain(self) -> dict[str, Any]:
        """Options that are not the default, as JSON that `read` and `--config` read back.

        What is in memory only is its name, which nothing reads back.
        """
        found = {}
        for f in fields(self):
            value = getattr(self, f.name)
            joined = isinstance(value, tuple) and isinstance(f.metadata.get("shell"), str)
            if (value != f.default or value != there(f)) and not f.metadata.get("hidden"):
                found[f.name] = JOINED.join(value) if joined else in_json(value)
        return found

    @classmethod
    def read(cls, plain: dict[str, Any]) -> Self:
        """What `plain` wrote; other options are the default of the command line.

        Raises:
            KvsearchError: there is no such option, or a value is out of range.
        """
        require_names(cls, plain, "a run")
        return cls(**{f.name: there(f) for f in fields(cls) if "shell" in f.metadata} | plain)


def require_names(kind: type[Config], given: dict[str, Any], what: str) -> None:
    """Raise a `KvsearchError` for a keyword that is no option of a config."""
    known = [f.name for f in fields(kind)]
    for name in given:
        if name not in known:
            raise KvsearchError(f"{what} has no option {quoted(name)}{nearest(name, known)}")


def there(of: Field[Any]) -> Any:
    """The value that an option has on the command line where it is not given."""
    value, how = of.metadata.get("shell", of.default), of.metadata
    for reads in (how["word"].parse if "word" in how else None, how.get("convert")):
        value = value if reads is None or value is None or value is MISSING else reads(value)
    return value


def flags_of(of: Field[Any]) -> list[str]:
    """Spellings on the command line, the first of which errors name."""
    flags: str = of.metadata.get("flags", f"--{of.name.replace('_', '-')}")
    return flags.split()


def in_json(value: Any) -> Any:
    """A value of an option in JSON."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple):
        return [in_json(v) for v in value]
    if isinstance(value, PathLike):
        return str(value)
    # a model, a text or a sampler in memory
    return getattr(value, "name", None) or type(value).__name__
