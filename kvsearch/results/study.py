"""What `study.json` says of a run: its model, texts and options, and what they came to."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from kvsearch.frozen import MOST, read_as
from kvsearch.policy import ModelShape
from kvsearch.workloads.items import See
from kvsearch.workloads.measured_parts import TEXT

# these do not make a run another one; `model.origin` is another sentence after the first download
FREE = ("versions", "options", "trials", "settings.left_out", "model.origin")
SCHEMA = "kvsearch.run/3"  # of study.json, measured.json and frozen.json

Count = Annotated[int, Field(ge=1, le=MOST)]


class _Record(BaseModel):
    """Fields that are read by name; others, and what an older version lacks, stay as they are."""

    model_config = ConfigDict(extra="allow", frozen=True)

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return self.model_dump(mode="json", exclude_unset=True)


class Shape(_Record):
    """Of the model, in numbers."""

    layers: Count
    kv_heads: Count
    head_dim: Count
    heads: Count
    widths: tuple[tuple[int, int], ...] = ()
    others: Annotated[int, Field(ge=0, le=MOST)] = 0


class Model(_Record):
    """The model; beside these: its origin and device."""

    name: str
    digest: str
    shape: Shape
    revision: str | None = None
    dtype: str | None = None


class Text(_Record):
    """A part of the text, or prompts; beside these: its text's hash, or numbers of prompts.

    Attributes:
        worth: of workloads, the nats per token that their contexts are worth.
    """

    name: str
    tokens: Count
    token_sha256: str
    worth: dict[str, float] = {}


class Texts(_Record):
    """The parts."""

    search: Text
    select: Text
    report: Text


class Settings(_Record):
    """What options came to, and those that make a run another one (`RunConfig.recorded`).

    Attributes:
        budget_slots, budget_bytes: the budget in both units.
        context: tokens of a window, or of the longest prompt with its answer.
        prompt: of prompts: tokens after which as many follow as after any.
        score_from: first scored position.
        report_windows: for every row.
        headline_windows: for the headline, if there are more.
        workloads: weights, where windows of a text and prompts were measured, or where they were
            given.
        left_out: workloads that had no use, and why.
        see: whether questions were seen before their context was compressed; None where none were
            asked.
        target: the runtime that was searched for.
        exclude_method: methods that the run was not to compare with.
    """

    budget_slots: int | float
    budget_bytes: Count
    context: Count
    prompt: int = 0
    score_from: Count
    report_windows: Count = 1
    headline_windows: Count | None = None
    workloads: dict[str, float] = {}
    left_out: dict[str, str] = {}
    see: See | None = None
    target: str | None = None
    exclude_method: list[str] = []

    @property
    def windowed(self) -> bool:
        """Whether windows of a text were measured."""
        return self.see is None or TEXT in self.workloads


class Study(_Record):
    """One `study.json`."""

    model: Model
    settings: Settings
    text: Texts
    versions: dict[str, str]
    options: dict[str, Any] = {}

    @property
    def shape(self) -> ModelShape:
        """Of the model."""
        return ModelShape(**self.model.shape.plain())

    def document(self) -> dict[str, Any]:
        """What the file holds."""
        return {"schema": SCHEMA, **self.plain()}

    @property
    def question(self) -> dict[str, Any]:
        """Dotted name -> value of every field that makes a run another one."""
        return dict(_leaves(json.loads(json.dumps(self.document()))))

    @classmethod
    def read(cls, file: Path) -> Self:
        """A file as it was written; `config.study` says which options it is of.

        Raises:
            FileNotFoundError: there is none.
            RunError: it is damaged, or another version of kvsearch wrote it.
        """
        return read_as(file, TypeAdapter(cls), SCHEMA)


def _leaves(data: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values, without what is `FREE`."""
    for name, value in ((prefix + key, value) for key, value in data.items()):
        if name in FREE:
            continue
        if isinstance(value, dict):
            yield from _leaves(value, f"{name}.")
        else:
            yield name, value
