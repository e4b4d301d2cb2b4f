"""One axis of a search space: the values of a knob, and which of them are near to one another."""

from math import exp, isfinite, log
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from kvsearch.errors import quoted
from kvsearch.frozen import Frozen
from kvsearch.policy_space.axes import Value

Words = dict[str, Value | list[Value]]

FIGURES = 3  # significant figures of a drawn number: more say nothing, and people read them


class Axis(Frozen):
    """Values of one knob: one of `choice`, `int` (low, high, step) or `float` (low, high).

    Attributes:
        choice: words or numbers.
        int_: whole numbers; without a step, all of them.
        float_: numbers, both ends included.
        log: ratios are drawn evenly, not differences; of whole numbers only without a step.
        when: earlier axes and the values with which this one is active.
    """

    choice: tuple[Value, ...] | None = None
    int_: tuple[int, int, int] | None = Field(default=None, alias="int")
    float_: tuple[float, float] | None = Field(default=None, alias="float")
    log: bool = False
    when: Words = Field(default_factory=dict)

    @field_validator("int_", mode="before")
    @classmethod
    def _step_of_one(cls, given: Any) -> Any:
        return [*given, 1] if isinstance(given, list | tuple) and len(given) == 2 else given

    @field_validator("int_")
    @classmethod
    def _whole_steps(cls, given: tuple[int, int, int] | None) -> tuple[int, int, int] | None:
        """The high end a whole number of steps from the low one, as Optuna has it."""
        if given is None or given[2] < 1 or given[0] > given[1]:
            return given
        low, high, step = given
        return low, high - (high - low) % step, step

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if sum(x is not None for x in (self.choice, self.int_, self.float_)) != 1:
            raise ValueError("give exactly one of choice, int or float")
        if self.choice is not None:
            if not self.choice:
                raise ValueError("choice is empty")
            for i, value in enumerate(self.choice):
                if value in self.choice[:i]:  # samplers compare by value: 1, 1.0 and true are one
                    raise ValueError(f"choice names {quoted(value)} twice")
            if self.log:
                raise ValueError("log goes with int or float, not with choice")
            return self
        low, high, step = self.range
        if low > high:
            raise ValueError(f"low {low} is above high {high}")
        if step is not None and step < 1:
            raise ValueError(f"step {step} must be at least 1")
        if self.log and (low <= 0 or step not in (None, 1)):
            raise ValueError("log needs numbers above 0, and whole ones without a step")
        return self

    @property
    def range(self) -> tuple[float, float, int | None]:
        """Low, high and step of an axis of numbers; the step is None if they need not be whole."""
        if self.int_ is not None:
            return self.int_
        assert self.float_ is not None
        return (*self.float_, None)

    @property
    def values(self) -> tuple[Value, ...]:
        """All values of a choice, the ends of a range."""
        return self.choice if self.choice is not None else self.range[:2]

    def contains(self, value: Value) -> bool:
        """Whether `value` is on the axis."""
        if self.choice is not None:
            return value in self.choice
        if isinstance(value, str | bool):
            return False
        low, high, step = self.range
        return low <= value <= high and (step is None or (value - low) % step == 0)

    def at(self, place: float) -> Value:
        """The number at a place of the range, from 0 (low) to 1 (high)."""
        low, high, step = self.range
        x = low * (high / low) ** place if self.log else low + (high - low) * place
        return on_grid(x, low, high, step)

    def place(self, value: Value) -> float:
        """Where in the range a number is, from 0 to 1; see `at`."""
        low, high, _ = self.range
        x = min(max(float(value), low), high)
        if low == high:
            return 0.0
        return log(x / low) / log(high / low) if self.log else (x - low) / (high - low)


def on_grid(x: float, low: float, high: float, step: int | None) -> Value:
    """The number of a range that is nearest to `x`."""
    if step is None:
        return min(max(float(f"{x:.{FIGURES}g}"), low), high)
    steps = round((min(max(x, low), high) - low) / step)
    return int(low) + step * steps


def drawn(u: float, low: float, high: float, step: int | None, log_: bool) -> Value:
    """The number of a range for a uniform `u` in [0, 1), as Optuna's distributions spread it."""
    if step is None:
        x = exp(log(low) + u * log(high / low)) if log_ else low + u * (high - low)
    elif log_:
        x = exp(log(low - 0.5) + u * log((high + 0.5) / (low - 0.5)))
    else:
        x = low - step / 2 + u * (high - low + step)
    assert isfinite(x)
    return on_grid(x, low, high, step)
