"""Whether `auto` may use a compiled implementation here: only after it has passed its probe.

The proof runs in this process, once per op, implementation, device and type. It cannot survive a
kernel that never ends, or one that reads outside its memory: then CUDA itself refuses everything
that follows in the process. KVSEARCH_TRITON=0 leaves Triton out.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from importlib import import_module
from threading import RLock
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from kvsearch_kernels.launch import lacks_memory, on
from kvsearch_kernels.probing import on_cpu

Key: TypeAlias = tuple[str, str, torch.device, torch.dtype]


class Provable(Protocol):
    """What a proof needs of an `Op`, see there."""

    @property
    def name(self) -> str:
        """For records and errors."""

    @property
    def impls(self) -> Mapping[str, str]:
        """Name -> module of each implementation."""

    @property
    def probe(self) -> str | None:
        """Module of the probe."""

    def run(self, impl: str, *args: Any, **kwargs: Any) -> Any:
        """Run the implementation named `impl`."""


_verdicts: dict[Key, str | None] = {}
_lock = RLock()


def subject(*args: Any, **kwargs: Any) -> tuple[torch.device, torch.dtype]:
    """Device and type that a call is about: those of its first tensor, or the type asked for."""
    held = _first((*args, *kwargs.values()))
    dtype: torch.dtype = kwargs.get("dtype", held.dtype)
    return held.device, dtype


def _first(x: Any) -> Tensor:
    """The first tensor of arguments, which may begin with a sequence or a dataclass."""
    while not isinstance(x, Tensor):
        x = x[0] if isinstance(x, Sequence) else getattr(x, fields(x)[0].name)
    return x


def trusted(op: Provable, impl: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """None if `impl` passed the probe of `op` here, or one sentence why `auto` passes over it.

    The first call runs the probe, and a failure warns; later ones use the stored result.

    Raises:
        Exception: the probe found no memory, twice; nothing is stored, and a caller that makes room
            may ask again.
    """
    key = (op.name, op.impls[impl], device, dtype)
    if key in _verdicts:  # without the lock: this is on the way of every call
        return _verdicts[key]
    with _lock:
        if key in _verdicts:
            return _verdicts[key]
        where = f"{op.name}[{impl}] on {device} in {dtype}"
        with on(device):
            capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if capturing:
            # a probe waits for the device, which would break the capture; the next call may prove
            return _warned(f"auto passes over {where}: a CUDA graph is captured before the proof")
        reason = _proven(op, impl, device, dtype)
        sentence = None if reason is None else f"auto passes over {where}: {reason}"
        _verdicts[key] = sentence  # before the warning, which may be set to raise
        return sentence and _warned(sentence)


def _proven(op: Provable, impl: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """What is wrong, errors included; a lack of memory says nothing about the implementation."""
    for again in (True, False):
        try:
            return prove(op, impl, device, dtype)
        except Exception as error:  # whatever a compiler or a launch may raise
            if not lacks_memory(error):
                line = (str(error).strip() or "no message").splitlines()[0]
                return f"{type(error).__name__}: {line}"
            if not again:
                raise
        torch.cuda.empty_cache()  # only now: until an `except` ends, the frames hold tensors
    raise AssertionError("unreachable")


def _warned(sentence: str) -> str:
    warnings.warn(sentence, RuntimeWarning, stacklevel=2)
    return sentence


def prove(op: Provable, impl: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Run the probe of `op` with `impl`, by name: None, or the first thing that is wrong.

    Raises:
        Exception: whatever the implementation raises.
    """
    return holds(op, partial(op.run, impl), device, dtype)


def holds(
    op: Provable, call: Callable[..., Any], device: torch.device, dtype: torch.dtype
) -> str | None:
    """Compare what `call` gives for the probe of `op`: None, or the first thing that is wrong."""
    if op.probe is None:
        return "the op has no probe"
    probe = import_module(op.probe)
    # under a caller's autocast the yardsticks would be computed in another type
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        for number, (args, kwargs) in enumerate(probe.cases(device, dtype)):
            got = on_cpu(call(*args, **kwargs))  # waits, so that errors show here
            reason: str | None = probe.differs(got, *on_cpu(args), **on_cpu(kwargs))
            if reason is not None:
                return f"case {number}: {reason}"
    return None
