"""One search: all options of `kvsearch.search` and `kvsearch run`, and what follows from them."""

from dataclasses import fields
from typing import Any

from kvsearch.errors import KvsearchError, TextError
from kvsearch.options.budget import Budget, BudgetConfig
from kvsearch.options.checks import path
from kvsearch.options.declare import ALWAYS, CHANGED, again, in_json, option, part
from kvsearch.options.executor import ExecutorConfig
from kvsearch.options.model import File, HeadLossConfig, ModelConfig
from kvsearch.options.report import ReportConfig
from kvsearch.options.search import DEFAULT_SPACE, SearchConfig
from kvsearch.options.workload import BatchConfig, WorkloadConfig
from kvsearch.policy import ModelShape

PROMPT_SPACE = "prompts"  # the default one, and when to compact
SLOTS = 256.0  # the budget where none is given
PROPOSALS = 6  # of Ray Tune, which is told their number before
MOST_PROPOSALS = 12  # of `--trials auto`
LEAST_SCORED = 64  # tokens of a window
STEP = 4  # contexts that a policy starts with, and gets at a time
STEP_TOKENS = 1024  # of a text, likewise: in shorter windows, several together


@part
class RunConfig(
    HeadLossConfig,
    ReportConfig,
    ExecutorConfig,
    SearchConfig,
    BatchConfig,
    WorkloadConfig,
    ModelConfig,
    BudgetConfig,
):
    """One search. Lengths are in tokens."""

    budget_slots: float | None = again(
        BudgetConfig, "budget_slots",
        help="memory, everything counted, in fp16 slots per layer [default: 256]",
    )  # fmt: skip
    out: File = option(None, "folder of the run [default: runs/...]", path, group="Output")

    def check(self) -> None:
        """Refuse what is for a text beside prompts, and windows of which too little is scored."""
        super().check()
        if not self.windowed and self.batch:
            raise KvsearchError("--batch is for a search on a text, not on prompts")
        if self.windowed and (self.score_from is not None or self.budget_bytes is None):
            self.first_scored(self.budget_slots or SLOTS)

    def recorded(self) -> dict[str, Any]:
        """What `study.json` has of these options among its settings, as JSON."""
        found = {}
        for f in fields(self):
            when, value = f.metadata.get("recorded"), getattr(self, f.name)
            mine = self.asked or f.name != "see"
            if mine and (when == ALWAYS or (when == CHANGED and value != f.default)):
                found[f.name] = in_json(value)
        return found

    def budget(self, shape: ModelShape) -> Budget:
        """The budget in both units; `shape` says what a slot costs."""
        return super().budget(shape) or Budget(SLOTS, shape.budget_bytes(SLOTS))

    @property
    def most_trials(self) -> int:
        """Free proposals at most: with `auto`, None, they end when nothing is to be gained."""
        if self.trials is not None:
            return self.trials
        return PROPOSALS if self.engine == "tune" else MOST_PROPOSALS

    @property
    def together(self) -> int:
        """Windows, or prompts, that policies start with, and that are one job of several
        evaluators; of prompts, as many of each workload. In Ray Tune, which sees one result per
        trial, all of them."""
        if self.engine == "tune":
            return self.searched
        if not self.windowed:
            return self.count * max(1, STEP // self.count)
        return self.count * (self.batch or max(1, -(-STEP_TOKENS // self.context)))

    @property
    def space_name(self) -> str:
        """The space that is searched: prompts without a text have one of their own by default."""
        own = not self.windowed and self.space == DEFAULT_SPACE
        return PROMPT_SPACE if own else self.space

    @property
    def grows(self) -> bool:
        """Whether the best policies get more windows than they start with."""
        return self.engine != "tune" and self.units > 1

    def first_scored(self, slots: float) -> int:
        """First scored position: by default the first at which a full budget of `slots` matters.

        Raises:
            TextError: fewer than `LEAST_SCORED` tokens of a window would be scored.
        """
        start = max(1, int(slots)) if self.score_from is None else self.score_from
        if not 1 <= start <= self.context - LEAST_SCORED:
            raise TextError(
                f"scoring from position {start} leaves fewer than {LEAST_SCORED} tokens of a "
                f"{self.context}-token window; raise --context or lower --budget"
            )
        return start
