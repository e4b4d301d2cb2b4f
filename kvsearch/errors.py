"""Errors that a user can mend, each one sentence that says what to do.

The command line prints the sentence and exits with code 2; anything that is not a
`KvsearchError` is a bug in kvsearch and exits with code 1.
"""

import difflib
from collections.abc import Iterable


class KvsearchError(ValueError):
    """Root of every error caused by the input; picklable, so workers can raise it."""


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


def lacks_memory(error: BaseException) -> bool:
    """Whether an error says that a device has too little memory, in whatever form."""
    from kvsearch_kernels.launch import lacks_memory as says_so  # imports torch, so not before

    return isinstance(error, OutOfMemory) or says_so(error)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint such as `; did you mean 'lacache'?` for a misspelt `name`, or the choices."""
    choices = sorted(known)
    close = difflib.get_close_matches(name, choices, n=3, cutoff=0.5)
    if close:
        return "; did you mean " + " or ".join(repr(c) for c in close) + "?"
    return "; known are " + ", ".join(choices)
