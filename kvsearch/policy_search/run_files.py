"""What `study.json`, `measured.json` and `frozen.json` hold; other fields are ignored."""

import json
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, Field, PlainSerializer, RootModel, ValidationError

from kvsearch.errors import RunError, quoted
from kvsearch.evaluation.measurement import Answered, Measurement
from kvsearch.frozen import MOST, first_error
from kvsearch.policy import Policy
from kvsearch.records import Example, Interval, Kind, Needles, Throughput, Trial

SCHEMA = "kvsearch.run/3"  # of study.json, measured.json and frozen.json
Count = Annotated[int, Field(ge=1, le=MOST)]


class _Shape(BaseModel):
    layers: Count
    kv_heads: Count
    head_dim: Count
    heads: Count
    widths: tuple[tuple[int, int], ...] = ()
    others: Annotated[int, Field(ge=0, le=MOST)] = 0


class _Model(BaseModel):
    name: str
    shape: _Shape


class _Settings(BaseModel):
    budget_slots: float
    budget_bytes: Count
    context: Count
    score_from: Count
    report_windows: Count = 1
    headline_windows: Count = 1


class _Text(BaseModel):
    name: str = ""


class Study(BaseModel):
    """Of `study.json`, by the present names."""

    model: _Model
    settings: _Settings
    text: dict[str, _Text]
    versions: dict[str, str]


class MeasuredRow(BaseModel):
    """A policy on the report part, beside its losses; see `records.Row`."""

    name: str
    kind: Kind
    fingerprint: Annotated[str, Field(pattern="^[0-9a-f]{1,64}$")]
    policy: Annotated[Policy, PlainSerializer(Policy.plain)]
    bytes_resident: int | None = None
    seconds: float
    impls: dict[str, str] = {}
    decode: Throughput | None = None
    stopped: Interval | None = None
    speed: float | None = None
    answers: tuple[Answered, ...] = ()

    @classmethod
    def of(cls, trial: Trial, found: Measurement, stopped: Interval | None = None) -> Self:
        """A row of a trial that was measured on the report part."""
        return cls(
            name=trial.name, kind=trial.kind, fingerprint=trial.fingerprint, policy=trial.policy,
            bytes_resident=found.bytes_resident, seconds=found.seconds, impls=found.impls,
            stopped=stopped, speed=trial.speed, answers=found.answers,
        )  # fmt: skip


class _Extra(BaseModel):
    label: str
    names: list[str]
    token_sha256: str = ""


class Size(BaseModel):
    """A policy at another size; `bytes` at its peak."""

    fingerprint: str
    bytes: int


class Sizes(BaseModel):
    """The policy called `name` at several sizes."""

    name: str
    sizes: list[Size]


class Measured(BaseModel):
    """Of `measured.json`, by the present names; `records.Summary` says what they mean."""

    rows: list[MeasuredRow]
    recommended: str | None = None
    seconds: float = 0.0
    resumed: bool = False
    compared: list[str]
    extra_text: dict[str, _Extra] = {}
    behind: dict[str, Interval] = {}
    dropped: dict[str, str] = {}
    examples: list[Example] = []
    sizes: list[Sizes] = []
    needles: Needles | None = None

    def row(self, name: str | None) -> MeasuredRow | None:
        """The row called `name`."""
        return next((r for r in self.rows if r.name == name), None)

    def text(self) -> str:
        """The file."""
        told = {"schema": SCHEMA, **self.model_dump()}
        return json.dumps(told, indent=1) + "\n"


class Frozen(BaseModel):
    """Of `frozen.json`: what was chosen before the report part was measured."""

    recommended: str | None
    rows: list[str]


def study(file: Path) -> dict[str, Any]:
    """What `study.json` holds, by the present names.

    Raises:
        FileNotFoundError: there is none.
        RunError: it is damaged, or a newer version of kvsearch wrote it.
    """
    return _read(file, Study, SCHEMA)


def measured(file: Path) -> Measured:
    """What `measured.json` holds; raises as `study` does."""
    found = Measured.model_validate(_read(file, Measured, SCHEMA))
    names = [row.name for row in found.rows]
    if "full" not in names or len({*names}) < len(names):
        raise RunError(f"{file} is damaged: field rows: not one row of each name, and `full`")
    best = found.recommended
    others = [n for extra in found.extra_text.values() for n in extra.names]
    for name in (*([] if best is None else [best]), *others):
        if name not in names:
            raise RunError(f"{file} is damaged: there is no row {quoted(name)}; restore it")
    return found


def frozen(file: Path) -> dict[str, Any]:
    """What `frozen.json` holds; raises as `study` does."""
    return _read(file, Frozen, SCHEMA)


def importances(file: Path) -> dict[str, float]:
    """What `importances.json` holds; nothing where there is none."""
    try:
        return _read(file, RootModel[dict[str, float]])
    except FileNotFoundError:
        return {}


def _read(file: Path, kind: type[BaseModel], schema: str | None = None) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise RunError(f"{file} is damaged: it holds no object; restore it")
        if schema is not None and found["schema"] != schema:
            raise RunError(
                f"{file} was written as {quoted(found['schema'])}, and this kvsearch reads "
                f"{quoted(schema)}"
            )
        kind.model_validate(found)
    except (RunError, FileNotFoundError):
        raise
    except ValidationError as e:
        raise RunError(f"{file} is damaged: {first_error(e, 'of a run')}; restore it") from e
    except OSError as e:
        raise RunError(f"cannot read {file}: {e.strerror or e}; restore it") from e
    except RecursionError as e:
        raise RunError(f"{file} is damaged: nested too deeply; restore it") from e
    except ValueError as e:
        raise RunError(f"{file} is damaged: not JSON ({e}); restore it") from e
    except (KeyError, TypeError, AttributeError) as e:
        raise RunError(f"{file} is damaged: {quoted(e)}; restore it") from e
    return found
