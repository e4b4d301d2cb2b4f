"""The memory budget in both of its units, and the setting that policies are sized for."""

import re
from dataclasses import dataclass
from fractions import Fraction

from kvsearch.errors import KvsearchError, TextError, quoted
from kvsearch.knobs import Setting
from kvsearch.policy import ModelShape

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


@dataclass(frozen=True)
class Budget:
    """Memory for one sequence, in both units.

    Attributes:
        slots: fp16 slots per layer.
        bytes: per sequence, in all layers.
    """

    slots: float
    bytes: int


def check_budget(slots: float | None, size: int | None) -> None:
    """Contradictions that need no model.

    Raises:
        KvsearchError: both units are given, or one is nothing or not finite.
    """
    if slots is not None and size is not None:
        raise KvsearchError("give --budget in slots or --budget-bytes, not both")
    if slots is not None and not 0 < slots <= MOST:
        raise KvsearchError(
            f"--budget must be above 0 fp16 slots per layer and at most 2^60, got {slots:g}"
        )
    if size is not None and not 0 < size <= MOST:
        raise KvsearchError(
            f"--budget-bytes must be above 0 bytes per sequence and at most 2^60, got {size}"
        )


def in_both_units(shape: ModelShape, slots: float | None, size: int | None) -> Budget | None:
    """The budget in both units, or None without one.

    Args:
        shape: the model's, which says what a slot costs.
        slots: fp16 slots per layer.
        size: bytes per sequence, instead.
    """
    check_budget(slots, size)
    if slots is not None:
        return Budget(slots, shape.budget_bytes(slots))
    return None if size is None else Budget(size / shape.budget_bytes(1), size)


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
