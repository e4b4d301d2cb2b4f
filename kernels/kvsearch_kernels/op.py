"""`Op`: one operation, its reference, and named faster implementations.

A named implementation never falls back: it runs, or it says in one sentence why it cannot.
"""

import os
import sys
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class UnsupportedError(NotImplementedError):
    """A named implementation cannot take these arguments."""


@dataclass(frozen=True)
class Op(Generic[P, R]):
    """An operation.

    Attributes:
        name: for records and errors.
        reference: torch only; defines the meaning.
        impls: name -> module with `forward`, same signature, and `why_not`, which returns None
            or the reason why these arguments cannot be taken. The first that can is `auto`, but
            never one whose module says that it is `emulated()`, and Triton only after it has
            passed the op's probe on that device, in that type (`trust`). KVSEARCH_TRITON=0 keeps
            `auto` from Triton, KVSEARCH_TRITON=1 skips the proof.
        probe: module of the probe that Triton has to pass; without one, `auto` never takes it.
    """

    name: str
    reference: Callable[P, R]
    impls: Mapping[str, str] = field(default_factory=dict)
    probe: str | None = None

    def pick(self, *args: P.args, **kwargs: P.kwargs) -> str:
        """Name of the implementation that `auto` runs on these arguments."""
        for name in self.impls:
            if self._passes(name, *args, **kwargs):
                return name
        return "reference"

    def _passes(self, impl: str, *args: P.args, **kwargs: P.kwargs) -> bool:
        """Whether `auto` may use `impl` on these arguments; proves it where that is due."""
        if self._why_not(impl, *args, **kwargs) is not None:
            return False  # first, because it is what a CPU says at every call
        wish = os.environ.get("KVSEARCH_TRITON") if impl == "triton" else "1"
        if wish == "0":
            return False
        emulated: Callable[[], bool] | None
        emulated = getattr(self._module(impl), "emulated", None)
        if emulated is not None and emulated():
            return False
        if wish == "1":
            return True
        from kvsearch_kernels.trust import subject, trusted  # torch; this module has none

        return trusted(self, impl, *subject(*args, **kwargs)) is None

    def _why_not(self, impl: str, *args: Any, **kwargs: Any) -> str | None:
        reason: str | None = self._module(impl).why_not(*args, **kwargs)
        return reason

    def _module(self, impl: str) -> Any:
        name = self.impls[impl]
        return sys.modules.get(name) or import_module(name)  # an import costs 1 us even then

    def run(self, impl: str, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the implementation named `impl`; `auto` picks, `reference` is always there.

        Raises:
            UnsupportedError: the named implementation cannot take these arguments.
        """
        if impl == "auto":
            return self._forward(self.pick(*args, **kwargs), *args, **kwargs)
        if impl != "reference":
            if impl not in self.impls:
                raise UnsupportedError(f"{self.name} has no implementation called {impl!r}")
            if reason := self._why_not(impl, *args, **kwargs):
                raise UnsupportedError(f"{self.name}[{impl}]: {reason}")
        return self._forward(impl, *args, **kwargs)

    def record(self, ran: MutableMapping[str, str], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the implementation that `auto` picks, and note its name in `ran`."""
        ran[self.name] = self.pick(*args, **kwargs)
        return self._forward(ran[self.name], *args, **kwargs)

    def again(self, impl: str, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run what `pick` named for arguments like these, without asking it once more."""
        return self._forward(impl, *args, **kwargs)

    def _forward(self, impl: str, *args: P.args, **kwargs: P.kwargs) -> R:
        if impl == "reference":
            return self.reference(*args, **kwargs)
        result: R = self._module(impl).forward(*args, **kwargs)
        return result

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the implementation that `auto` picks."""
        return self.run("auto", *args, **kwargs)
