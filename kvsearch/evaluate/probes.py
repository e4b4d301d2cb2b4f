"""Sensitivity measurements in parts (probes), each of which any evaluator can answer by itself.

Questions of one basis about one window begin alike, such as with the pass under the full cache. An
evaluator keeps that beginning, so that one evaluator alone begins once.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvsearch.policy import Policy

if TYPE_CHECKING:
    from kvsearch.evaluate.divergence import Divergence
    from kvsearch.evaluate.quality import Evaluator


class Question(Protocol):
    """What is asked about a window; picklable."""

    @property
    def basis(self) -> Hashable:
        """Questions of one basis begin alike."""

    def begin(self, evaluator: "Evaluator", ids: NDArray[np.int64]) -> Any:
        """What they share, made from the window's tokens `[T]`."""

    def answer(self, begun: Any) -> NDArray[np.float64]:
        """The answer."""


@dataclass(frozen=True)
class Probe:
    """A question about the first tokens of a window.

    Attributes:
        window: number of the window.
        tokens: of it, from the first.
        question: what is asked.
    """

    window: int
    tokens: int
    question: Question


# probes, and what to call after each -> their answers in that order
Ask = Callable[[Sequence[Probe], Callable[[], None]], list[NDArray[np.float64]]]


@dataclass(frozen=True)
class Lost:
    """Mean KL divergence from the full cache, in nats per token `[]`.

    Attributes:
        policy: what is compared with the full cache.
        same: how many of the model's first layers keep everything under `policy`, too.
        first: first position that counts.
    """

    policy: Policy
    same: int
    first: int

    @property
    def basis(self) -> Hashable:
        """One pass under the full cache serves all policies."""
        return "full cache"

    def begin(self, evaluator: "Evaluator", ids: NDArray[np.int64]) -> "Divergence":
        """That pass."""
        return evaluator.divergence(ids[None])

    def answer(self, begun: "Divergence") -> NDArray[np.float64]:
        """A pass under the policy, from its first layer that differs."""
        return np.asarray(float(begun.of(self.policy, self.same)[:, self.first :].mean()))


class Prober:
    """Answers probes in this process; keeps the beginning of the last one.

    Args:
        evaluator: of the model.
    """

    def __init__(self, evaluator: "Evaluator") -> None:
        self._evaluator = evaluator
        self._begun: tuple[Hashable, Any] | None = None

    def answer(self, windows: NDArray[np.int64], probe: Probe) -> NDArray[np.float64]:
        """The answer to one probe of token windows `[W, T]`."""
        ids, question = windows[probe.window, : probe.tokens], probe.question
        about = (question.basis, ids.tobytes())
        if self._begun is None or self._begun[0] != about:
            self.forget()  # before the next one needs memory
            self._begun = about, question.begin(self._evaluator, ids)
        return question.answer(self._begun[1])

    def forget(self) -> None:
        """Free the memory."""
        self._begun = None


def here(evaluator: "Evaluator", windows: NDArray[np.int64]) -> Ask:
    """Answers about token windows `[W, T]` from this process."""

    def ask(
        probes: Sequence[Probe], progress: Callable[[], None] = lambda: None
    ) -> list[NDArray[np.float64]]:
        prober, found = Prober(evaluator), []
        for probe in probes:
            found.append(prober.answer(windows, probe))
            progress()
        return found

    return ask
