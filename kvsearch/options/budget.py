"""The memory budget in both of its units, and the setting that policies are sized for."""

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from kvsearch.errors import KvsearchError, TextError, quoted
from kvsearch.options.checks import within
from kvsearch.options.declare import Config, Word, option, part
from kvsearch.policy import ModelShape
from kvsearch.policy_space import Setting

MOST = 1 << 60  # slots, or bytes: more than any memory, and what is counted from it stays finite

UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9} | {
    "kib": 2**10, "mib": 2**20, "gib": 2**30,
}  # fmt: skip


def bytes_of(value: object) -> int:
    """A size such as 5000000, 5MB or 4.8MiB in bytes; fractions of a byte are rounded down.

    Raises:
        KvsearchError: it is none.
    """
    told = f"{quoted(value)} is not a size in bytes per sequence, such as 5000000, 5MB or 4.8MiB"
    found = re.fullmatch(r"([-+]?[\d_]+(?:\.\d+)?)\s*([A-Za-z]*)", str(value).strip())
    if found is None or found[2].lower() not in UNITS:
        raise KvsearchError(told)
    try:
        size = Fraction(found[1]) * UNITS[found[2].lower()]
    except ValueError as error:  # underscores where Python has none
        raise KvsearchError(told) from error
    if size.denominator > 1 and not found[2]:
        raise KvsearchError(told)
    return int(size)


def _slots(value: Any) -> float:
    try:
        return float(value)
    except ValueError:
        told = "is not a number of fp16 slots per layer; a size in bytes is --budget-bytes"
        raise ValueError(f"{quoted(value)} {told}") from None


@dataclass(frozen=True)
class Budget:
    """Memory for one sequence, in both units.

    Attributes:
        slots: fp16 slots per layer.
        bytes: per sequence, in all layers.
    """

    slots: float
    bytes: int


@part
class BudgetConfig(Config):
    """How much memory, in one of two units."""

    budget_slots: float | None = option(
        None,
        "size a method to this, in fp16 slots per layer",
        check=within(
            lambda slots: 0 < slots <= MOST, "above 0 fp16 slots per layer and at most 2^60"
        ),
        word=Word("float", _slots, (int, float), "a number"),
        metavar="SLOTS", flags="--budget --budget-slots", group="Budget and model",
    )  # fmt: skip
    budget_bytes: int | None = option(
        None,
        "the same per sequence in bytes, or as 5MB or 4.8MiB, instead",
        check=within(lambda size: 0 < size <= MOST, "above 0 bytes per sequence and at most 2^60"),
        word=Word("integer", bytes_of, (int, str), "a size in bytes"),
        metavar="BYTES", group="Budget and model", instead="budget_slots",
    )  # fmt: skip

    def check(self) -> None:
        """Refuse both units."""
        super().check()
        if self.budget_slots is not None and self.budget_bytes is not None:
            raise KvsearchError("give --budget in slots or --budget-bytes, not both")

    @property
    def sized(self) -> bool:
        """Whether there is a budget."""
        return self.budget_slots is not None or self.budget_bytes is not None

    def budget(self, shape: ModelShape) -> Budget | None:
        """The budget in both units, or None without one; `shape` says what a slot costs."""
        if self.budget_bytes is not None:
            return Budget(self.budget_bytes / shape.budget_bytes(1), self.budget_bytes)
        slots = self.budget_slots
        return None if slots is None else Budget(slots, shape.budget_bytes(slots))


def sized_for(
    shape: ModelShape, limit: Budget | None, context: int, prompt: int = 0, prompts: bool = False
) -> Setting:
    """What policies are sized for.

    Args:
        shape: the model's.
        limit: the budget; None: no policy is sized by it.
        context: tokens of a window, or of the longest prompt with its answer.
        prompt: how many of them come in one call.
        prompts: words for prompts in what is raised.

    Raises:
        TextError: a window never fills the budget.
    """
    if limit is not None and limit.slots >= context:
        what, how = f"a window of {context} tokens", "raise --context or lower --budget"
        if prompts:
            what = f"the longest prompt, of {context} tokens with its answer,"
            how = "lower --budget or take longer prompts"
        raise TextError(
            f"{what} never exceeds a budget of {limit.slots:g} slots, so there is nothing to "
            f"compress; {how}"
        )
    size = None if limit is None else limit.bytes
    return Setting(shape, size, context, prompt=prompt)
