"""What `measured.json` and `frozen.json` hold; other fields are ignored."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

from kvsearch.errors import RunError, quoted
from kvsearch.frozen import read_as
from kvsearch.results.measurement import Measurement
from kvsearch.results.records import Example, Interval, MeasuredPolicy, Trial, plain
from kvsearch.results.study import SCHEMA


def measured_row(
    trial: Trial, found: Measurement, stopped: Interval | None = None
) -> MeasuredPolicy:
    """A trial that was measured on the report part."""
    return MeasuredPolicy(
        name=trial.name, kind=trial.kind, policy=trial.policy, fingerprint=trial.fingerprint,
        bytes_resident=found.bytes_resident, seconds=found.seconds, impls=found.impls,
        stopped=stopped, speed=trial.speed,
    )  # fmt: skip


@dataclass(frozen=True)
class ExtraText:
    """Policies that were measured on a further text, by name."""

    label: str
    names: list[str]
    token_sha256: str = ""


@dataclass(frozen=True)
class Size:
    """A policy at another size; `bytes` at its peak."""

    fingerprint: str
    bytes: int


@dataclass(frozen=True)
class Sizes:
    """The policy called `name` at several sizes."""

    name: str
    sizes: list[Size]


@dataclass
class Measured:
    """Of `measured.json`, by the present names; `records.Summary` says what they mean."""

    rows: list[MeasuredPolicy]
    recommended: str | None = None
    seconds: float | None = 0.0
    resumed: bool = False
    extra_text: dict[str, ExtraText] = field(default_factory=dict)
    behind: dict[str, Interval] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    examples: list[Example] = field(default_factory=list)
    sizes: list[Sizes] = field(default_factory=list)

    def text(self) -> str:
        """The file."""
        return _text(self)


@dataclass(frozen=True)
class Frozen:
    """Of `frozen.json`: what was chosen before the report part was measured.

    Attributes:
        recommended: name of the policy.
        rows: names of all policies to be measured.
        search_front: names on the front of the search, within the budget, least loss first.
    """

    recommended: str | None
    rows: list[str]
    search_front: list[str] = field(default_factory=list)

    def text(self) -> str:
        """The file."""
        return _text(self)


_MEASURED = TypeAdapter(Measured)
_FROZEN, _IMPORTANCES = TypeAdapter(Frozen), TypeAdapter(dict[str, float])


def measured(file: Path) -> Measured:
    """What `measured.json` holds; raises as `Study.read` does."""
    found = read_as(file, _MEASURED, SCHEMA)
    names = [row.name for row in found.rows]
    if "full" not in names or len({*names}) < len(names):
        raise RunError(f"{file} is damaged: field rows: not one row of each name, and `full`")
    best = found.recommended
    others = [n for extra in found.extra_text.values() for n in extra.names]
    for name in (*([] if best is None else [best]), *others):
        if name not in names:
            raise RunError(f"{file} is damaged: there is no row {quoted(name)}; restore it")
    return found


def frozen(file: Path) -> Frozen:
    """What `frozen.json` holds; raises as `Study.read` does."""
    return read_as(file, _FROZEN, SCHEMA)


def importances(file: Path) -> dict[str, float]:
    """What `importances.json` holds; nothing where there is none."""
    try:
        return read_as(file, _IMPORTANCES)
    except FileNotFoundError:
        return {}


def _text(of: Measured | Frozen) -> str:
    return json.dumps({"schema": SCHEMA, **plain(of)}, indent=1) + "\n"
