"""Errors that a user can mend, each one sentence that says what to do.

The command line prints the sentence and exits with code 2; anything that is not a
`KvsearchError` is a bug in kvsearch and exits with code 1.
"""

import difflib
from collections.abc import Iterable

SHORT, LONG = 60, 1000  # characters of a value in a message, and of a message


class KvsearchError(ValueError):
    """Root of every error caused by the input; picklable, so workers can raise it.

    Its message is one line whatever values it names.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(one_line(message))


class PolicyError(KvsearchError):
    """A policy that contradicts itself, or that a model cannot run."""


class SpaceError(KvsearchError):
    """A search space file with a wrong field, range or condition."""


class ModelError(KvsearchError):
    """A model that cannot be found, loaded, or served with the policy asked for."""


class OutOfMemory(ModelError):
    """A device with too little memory for a job; a smaller job may still fit."""


class TextError(KvsearchError):
    """A text or dataset that cannot be read, or is too short for the windows."""


class RunError(KvsearchError):
    """A run folder that cannot be written, read or resumed."""


class ExtensionWarning(UserWarning):
    """Something that another package adds and that is left out, and why."""


def lacks_memory(error: BaseException) -> bool:
    """Whether an error says that a device has too little memory, in whatever form."""
    from kvsearch_kernels.launch import lacks_memory as says_so  # imports torch, so not before

    return isinstance(error, OutOfMemory) or says_so(error)


def quoted(value: object, most: int = SHORT) -> str:
    """A value of the user's as it stands in a message: as Python writes it, on one line, cut."""
    if isinstance(value, str) and len(value) > most:
        return f"{value[:most]!r}... ({len(value):,} characters)"
    text = repr(value)
    return text if len(text) <= most + 20 else f"{text[:most]}..."


def named(path: object) -> str:
    """A path as it stands in a message: as it is, unless it is far too long for one."""
    return str(path) if len(str(path)) <= LONG // 3 else quoted(str(path))


def reason(error: BaseException) -> str:
    """Why something failed, without the name that an error of the system repeats."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def one_line(message: str) -> str:
    """A message without line ends and control characters; what is too long loses its middle."""
    line = " ".join(str(message).splitlines())
    if len(line) > LONG:
        line = f"{line[: LONG // 2]} ... {line[-LONG // 3 :]}"
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)


def nearest(name: object, known: Iterable[str]) -> str:
    """Return a hint such as `; did you mean 'lacache'?` for a misspelt `name`, or the choices."""
    choices = sorted(known)
    close = difflib.get_close_matches(str(name)[:SHORT], choices, n=3, cutoff=0.5)
    if close:
        return "; did you mean " + " or ".join(repr(c) for c in close) + "?"
    return "; known are " + ", ".join(choices)
