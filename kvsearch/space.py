"""Search spaces: YAML files with a closed schema and no code.

A space names knobs of `kvsearch.knobs` and the values to try. A knob whose `when` does not hold
takes its default, so equal behaviour gives equal policies.
"""

from collections.abc import Mapping
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError, model_validator

from kvsearch.errors import SpaceError, nearest
from kvsearch.frozen import Frozen
from kvsearch.knobs import KNOBS, Value, check_value, modern
from kvsearch.yaml_file import read_mapping

Words = dict[str, Value | list[Value]]


class Axis(Frozen):
    """Values of one knob: one of `choice`, `int` (low, high, step) or `float` (low, high)."""

    choice: tuple[Value, ...] | None = None
    int_: tuple[int, int, int] | None = Field(default=None, alias="int")
    float_: tuple[float, float] | None = Field(default=None, alias="float")
    log: bool = False
    when: Words = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if sum(x is not None for x in (self.choice, self.int_, self.float_)) != 1:
            raise ValueError("give exactly one of choice, int or float")
        if self.choice is not None and not self.choice:
            raise ValueError("choice is empty")
        ends = self.int_ or self.float_
        if ends is not None and ends[0] > ends[1]:
            raise ValueError(f"low {ends[0]} is above high {ends[1]}")
        return self


class SearchSpace(Frozen):
    """A space over knobs.

    Attributes:
        version: of the schema.
        name: for records.
        about: one sentence for people.
        axes: knob -> values, in the order in which they are drawn.
        forbid: combinations that are never proposed, each a mapping knob -> value or values.
    """

    version: int = Field(ge=1, le=2)
    name: str
    about: str = ""
    axes: dict[str, Axis]
    forbid: tuple[Words, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _modern(cls, data: Any) -> Any:
        """Read earlier spaces by today's names of knobs."""
        if not isinstance(data, dict) or data.get("version") not in (1, 2):
            return data
        axes, forbid = data.get("axes"), data.get("forbid")
        if not isinstance(axes, dict) or not isinstance(forbid or [], list):
            return data
        new = {
            name: {**axis, "when": modern(axis["when"])}
            if isinstance(axis, dict) and isinstance(axis.get("when"), dict)
            else axis
            for name, axis in modern(axes).items()
        }
        rules = [modern(r) if isinstance(r, dict) else r for r in forbid or []]
        return {**data, "version": 2, "axes": new, "forbid": rules}

    @model_validator(mode="after")
    def _speaks_the_vocabulary(self) -> Self:
        seen: list[str] = []
        for knob, axis in self.axes.items():
            ends = axis.int_[:2] if axis.int_ else axis.float_
            for value in axis.choice or ends or ():
                if reason := check_value(knob, value):
                    raise ValueError(f"axes.{knob}: {reason}")
            for other, wanted in axis.when.items():
                if other not in seen:
                    raise ValueError(f"axes.{knob}.when: {other!r} is not an earlier axis")
                self._words(f"axes.{knob}.when", other, wanted)
            seen.append(knob)
        for i, rule in enumerate(self.forbid):
            for other, wanted in rule.items():
                self._words(f"forbid.{i}", other, wanted)
        return self

    @staticmethod
    def _words(where: str, knob: str, wanted: Value | list[Value]) -> None:
        for value in wanted if isinstance(wanted, list) else [wanted]:
            if reason := check_value(knob, value):
                raise ValueError(f"{where}.{knob}: {reason}")

    def suggest(self, trial: Any) -> dict[str, Value]:
        """Draw one point with an Optuna trial (anything with its `suggest_*` methods)."""
        knobs: dict[str, Value] = {}
        for name, axis in self.axes.items():
            if not _holds(axis.when, knobs):
                continue
            if axis.choice is not None:
                knobs[name] = trial.suggest_categorical(name, list(axis.choice))
            elif axis.int_ is not None:
                low, high, step = axis.int_
                knobs[name] = trial.suggest_int(name, low, high, step=step)
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
        """`knobs` as values of the active axes, or None if the point is not in the space."""
        given = {k: v for k, v in knobs.items() if v != KNOBS[k].default}
        out: dict[str, Value] = {}
        for name, axis in self.axes.items():
            if not _holds(axis.when, out):
                continue
            value = given.pop(name, KNOBS[name].default)
            if not _contains(axis, value):
                return None
            out[name] = value
        return None if given or self.forbidden(out) else out

    @property
    def digest(self) -> str:
        """Hash of everything that decides what is proposed."""
        text = self.model_dump_json(by_alias=True, exclude={"about"})
        return sha256(text.encode()).hexdigest()[:16]


def _holds(conditions: Mapping[str, Any], knobs: Mapping[str, Value]) -> bool:
    """Whether every named knob has the wanted value, or one of them; absent knobs are defaults."""
    for name, wanted in conditions.items():
        value = knobs[name] if name in knobs else KNOBS[name].default
        for option in wanted if isinstance(wanted, list) else [wanted]:
            if value == option and isinstance(value, bool) == isinstance(option, bool):
                break
        else:
            return False
    return True


def _contains(axis: Axis, value: Value) -> bool:
    if axis.choice is not None:
        return value in axis.choice
    if isinstance(value, str):
        return False
    if axis.int_ is not None:
        low, high, step = axis.int_
        return low <= value <= high and (value - low) % step == 0
    assert axis.float_ is not None
    return axis.float_[0] <= value <= axis.float_[1]


def _folders() -> list[Path]:
    shipped = Path(str(files("kvsearch"))) / "_search_spaces"
    checkout = Path(__file__).resolve().parent.parent / "search_spaces"
    return [f for f in (shipped, checkout) if f.is_dir()]


def names() -> list[str]:
    """Spaces that come with kvsearch."""
    return sorted({p.stem for folder in _folders() for p in folder.glob("*.yaml")})


def load(name: str) -> SearchSpace:
    """Read a space by name or path.

    Raises:
        SpaceError: no such space, or a wrong field, whose path is named.
    """
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        found = [f / f"{name}.yaml" for f in _folders() if (f / f"{name}.yaml").is_file()]
        if not found:
            raise SpaceError(f"unknown search space {name!r}{nearest(name, names())}")
        path = found[0]
    data = read_mapping(path, "search space", SpaceError)
    try:
        return SearchSpace.model_validate(data)
    except ValidationError as e:
        first = e.errors()[0]
        loc = ".".join(str(p) for p in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        sentence = f"{path}: {'field ' + loc + ': ' if loc else ''}{message}"
        raise SpaceError(" ".join(sentence.split())) from e
