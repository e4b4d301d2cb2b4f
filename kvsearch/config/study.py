"""What `study.json` says of a run: its options, and what they came to with its model and text."""

from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from kvsearch.config.run_config import RunConfig
from kvsearch.errors import KvsearchError, RunError
from kvsearch.frozen import MOST
from kvsearch.policy import ModelShape
from kvsearch.policy_search.run_files import SCHEMA, read_as
from kvsearch.workloads.parts import TEXT

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
    """The model; beside these: its origin, revision, dtype and device."""

    name: str
    digest: str
    shape: Shape


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


class Study(_Record):
    """One `study.json`."""

    model: Model
    settings: Settings
    text: Texts
    versions: dict[str, str]
    options: dict[str, Any] = {}

    @cached_property
    def config(self) -> RunConfig:
        """The options of the run; of those that an older version did not record, what they came to.

        Raises:
            KvsearchError: one is unknown, or out of range.
        """
        names = {f.name for f in fields(RunConfig) if "recorded" in f.metadata}
        recorded = {k: v for k, v in self.settings.plain().items() if k in names}
        s, known = self.settings, self.options
        if "options" not in self.model_fields_set:
            known = {"budget_slots": s.budget_slots, "context": s.context}
            known |= {"score_from": s.score_from, "report_windows": s.report_windows}
        if not s.workloads and "see" not in recorded:  # an older run does not say so
            known = {"text_only": True, **known}
        elif not s.workloads and ("text" in known or "dataset" in known):
            known = {"weight": [f"{TEXT}=0"], **known}
        return RunConfig.read({**known, **recorded})

    @property
    def shape(self) -> ModelShape:
        """Of the model."""
        return ModelShape(**self.model.shape.plain())

    def document(self) -> dict[str, Any]:
        """What the file holds."""
        return {"schema": SCHEMA, **self.plain()}

    @classmethod
    def read(cls, file: Path) -> Self:
        """A file as it was written.

        Raises:
            FileNotFoundError: there is none.
            RunError: it is damaged, or another version of kvsearch wrote it.
        """
        found = read_as(file, TypeAdapter(cls), SCHEMA)
        try:
            _ = found.config
        except (KvsearchError, TypeError) as e:
            raise RunError(f"{file} is of a run that this kvsearch cannot read: {e}") from e
        return found
