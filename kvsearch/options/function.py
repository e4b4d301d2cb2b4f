"""Functions whose keywords are the options of a config."""

import inspect
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from textwrap import fill
from typing import Any, ParamSpec, Protocol, TypeVar, cast, get_args, get_origin, overload

from kvsearch.options.declare import Config, Given, require_names

P = ParamSpec("P")
R = TypeVar("R", covariant=True)
C = TypeVar("C", bound=Config)
CIn = TypeVar("CIn", bound=Config, contravariant=True)


class Command(Protocol[P, CIn, R]):
    """A function of a config, or of the same options as arguments."""

    @overload
    def __call__(self, config: CIn, /) -> R: ...
    @overload
    def __call__(self, *args: P.args, **options: P.kwargs) -> R: ...


def takes(kind: Callable[P, C]) -> Callable[[Callable[[C], R]], Command[P, C, R]]:
    """Have a function of a config take its options as arguments as well.

    Type checkers, `inspect.signature` and `help` see those of the config, with their help.

    Raises:
        KvsearchError: in the function: there is no such option, or a value is out of range.
    """
    config = cast(type[C], kind)

    def made(function: Callable[[C], R]) -> Command[P, C, R]:
        @wraps(function)
        def call(*args: Any, **options: Any) -> R:
            if not options and len(args) == 1 and isinstance(args[0], config):
                return function(args[0])
            require_names(config, options, function.__name__)
            return function(config(*args, **options))

        told = inspect.signature(function).return_annotation
        call.__signature__ = _signature(config, told)  # type: ignore[attr-defined]
        call.__doc__ = documented(inspect.getdoc(function) or "", config)
        return cast(Command[P, C, R], call)

    return made


def _signature(config: type[Config], told: Any) -> inspect.Signature:
    """Of a function that takes the options of a config, in the forms in which they are given."""
    given = [
        p.replace(annotation=get_args(p.annotation)[0]) if get_origin(p.annotation) is Given else p
        for p in inspect.signature(config).parameters.values()
    ]
    given.sort(key=lambda p: p.name == "progress")
    return inspect.Signature(given, return_annotation=told)


def documented(doc: str, config: type[Config]) -> str:
    """A docstring in Google style with the options of a config as arguments.

    What has no help has the docstring of the class that declares it.
    """
    head, returns, tail = doc.partition("Returns:")
    lines = [head.rstrip(), "", "Args:"]
    by_name = {f.name: f.metadata for f in fields(config)}
    for name in _signature(config, None).parameters:
        how = by_name[name]
        of = next(c for c in reversed(config.__mro__) if name in vars(c).get("__annotations__", ()))
        told = how.get("help", of.__doc__).rstrip(".") + how.get("python", "")
        begin, rest = " " * 4, " " * 8
        lines.append(fill(f"{name}: {told}.", 96, initial_indent=begin, subsequent_indent=rest))
    return "\n".join([*lines, "", returns + tail])
