"""A search space: knobs of `kvsearch.policy_space` and the values to try.

A knob whose `when` does not hold takes its default (a dotted one, what its preset says), so equal
behaviour gives equal policies.
"""

from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from itertools import chain, product
from typing import Any, Self

from pydantic import Field, model_validator

from kvsearch.errors import quoted
from kvsearch.frozen import Frozen
from kvsearch.policy_space.axes import KNOBS, Value, check_value
from kvsearch.policy_space.dotted import BASES, effective, has_field, respelled
from kvsearch.policy_space.space_axis import Axis, Words


class SearchSpace(Frozen):
    """A space over knobs.

    Attributes:
        version: of the schema.
        name: for records.
        about: one sentence for people.
        axes: knob -> values, in the order in which they are drawn.
        forbid: combinations that are never proposed, each a mapping knob -> value or values.
    """

    version: int = Field(ge=2, le=2)
    name: str
    about: str = ""
    axes: dict[str, Axis]
    forbid: tuple[Words, ...] = ()

    @model_validator(mode="after")
    def _speaks_the_vocabulary(self) -> Self:
        seen: list[str] = []
        for knob, axis in self.axes.items():
            for value in axis.choice or self._ends(knob, axis):
                if reason := check_value(knob, value):
                    raise ValueError(f"axes.{knob}: {reason}")
            if axis.float_ is not None and KNOBS[knob].number is int:  # what lies between the ends
                raise ValueError(f"axes.{knob}: whole numbers are needed; give int, not float")
            for other, wanted in axis.when.items():
                if other not in seen:
                    raise ValueError(f"axes.{knob}.when: {quoted(other)} is not an earlier axis")
                self._words(f"axes.{knob}.when", other, wanted)
            self._refines(knob, seen)
            seen.append(knob)
        for i, rule in enumerate(self.forbid):
            if not rule:
                raise ValueError(f"forbid.{i}: an empty rule would forbid everything")
            for other, wanted in rule.items():
                self._words(f"forbid.{i}", other, wanted)
        return self

    @staticmethod
    def _ends(knob: str, axis: Axis) -> Iterable[float]:
        """The numbers of a range that have to be admitted: its ends, and all where gaps may be."""
        low, high, step = axis.range
        gaps = knob in KNOBS and KNOBS[knob].only and step is not None
        return chain((low, high), range(int(low), int(high), step) if gaps and step else ())

    def _refines(self, knob: str, seen: list[str]) -> None:
        """A dotted knob goes with every preset that may be drawn when it is."""
        base, dot, field = knob.partition(".")
        if not dot:
            return
        if base in self.axes and base not in seen:
            raise ValueError(f"axes.{knob}: {base} must be an earlier axis")
        for preset in self._presets(base, knob):
            if not has_field(base, preset, field):
                raise ValueError(
                    f"axes.{knob}: {base} {quoted(preset)} has no {field}; let `when` name the "
                    f"values of {base} that have"
                )

    def _presets(self, base: str, knob: str) -> list[Value | None]:
        """Values of the knob `base` with which the axis `knob` may be active."""
        axis, when = self.axes.get(base), self.axes[knob].when
        found: list[Value | None] = [KNOBS[base].default] if axis is None else [*axis.values]
        for other, wanted in when.items():
            if other == base:
                found = [p for p in found if _holds({base: wanted}, {} if p is None else {base: p})]
            elif other.startswith(f"{base}."):
                found = [p for p in found if p in self._presets(base, other)]
        return found

    @staticmethod
    def _words(where: str, knob: str, wanted: Value | list[Value]) -> None:
        for value in wanted if isinstance(wanted, list) else [wanted]:
            if reason := check_value(knob, value):
                raise ValueError(f"{where}.{knob}: {reason}")

    def suggest(self, trial: Any) -> dict[str, Value]:
        """Draw one point with an Optuna trial (anything with its `suggest_*` methods)."""
        knobs: dict[str, Value] = {}
        for name, axis in self.axes.items():
            if axis.when and not _holds(axis.when, knobs):
                continue
            if axis.choice is not None:
                knobs[name] = trial.suggest_categorical(name, list(axis.choice))
            elif axis.int_ is not None:
                low, high, step = axis.int_
                knobs[name] = trial.suggest_int(name, low, high, step=step, log=axis.log)
            elif axis.float_ is not None:
                knobs[name] = trial.suggest_float(name, *axis.float_, log=axis.log)
        return knobs

    def forbidden(self, knobs: Mapping[str, Value]) -> str | None:
        """The rule that excludes `knobs`, as a sentence, or None."""
        for rule in self.forbid:
            if _holds(rule, knobs):
                return "the space forbids " + ", ".join(f"{k}={knobs.get(k)}" for k in rule)
        return None

    def params(self, knobs: Mapping[str, Value]) -> dict[str, Value] | None:
        """`knobs` as values of the active axes, or None if the point is not in the space.

        A preset that the space does not list is looked for by its numbers.
        """
        given = {k: v for k, v in knobs.items() if v != KNOBS[k].default}
        found = (self._params(dict(spelling)) for spelling in self._spellings(given))
        return next((out for out in found if out is not None), None)

    def _spellings(self, given: dict[str, Value]) -> Iterator[dict[str, Value]]:
        """`given`, with presets that the space lacks as refinements of others that it has."""
        options: list[list[dict[str, Value]]] = []
        for base in BASES:
            axis, preset = self.axes.get(base), effective(base, given)
            if axis is None or axis.choice is None or preset is None or axis.contains(preset):
                continue
            each = [(other, respelled(base, preset, other)) for other in axis.choice]
            spelt = [{base: o, **fields} for o, fields in each if fields is not None]
            options.append([*([{}] if axis.when else []), *spelt])  # it may be inactive
            given = {k: v for k, v in given.items() if k != base}
        for chosen in product(*options):
            yield {k: v for part in chosen for k, v in part.items()} | given

    def _params(self, given: dict[str, Value]) -> dict[str, Value] | None:
        out: dict[str, Value] = {}
        for name, axis in self.axes.items():
            if not _holds(axis.when, out):
                continue
            value = given.pop(name) if name in given else effective(name, out)
            if value is None or not axis.contains(value):
                return None
            out[name] = float(value) if axis.float_ is not None else value
        return None if given or self.forbidden(out) else out

    def opened_by(self, name: str) -> set[str]:
        """Axes that only some values of the axis `name` make active, itself or through others."""
        found: set[str] = set()
        for other, axis in self.axes.items():
            if name in axis.when or not found.isdisjoint(axis.when):
                found.add(other)
        return found

    @property
    def digest(self) -> str:
        """Hash of everything that decides what is proposed."""
        text = self.model_dump_json(by_alias=True, exclude={"about"})
        return sha256(text.encode()).hexdigest()[:16]


def _holds(conditions: Mapping[str, Any], knobs: Mapping[str, Value]) -> bool:
    """Whether every named knob has the wanted value, or one of them; see `effective`."""
    for name, wanted in conditions.items():
        value = knobs[name] if name in knobs else effective(name, knobs)
        for option in wanted if isinstance(wanted, list) else [wanted]:
            if value == option and isinstance(value, bool) == isinstance(option, bool):
                break
        else:
            return False
    return True
