"""What `kvsearch.search` and `kvsearch run` can be asked, and contradictions that need no model."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kvsearch.app.budget import check_budget
from kvsearch.app.inputs import TextOptions
from kvsearch.app.workloads import PromptOptions
from kvsearch.errors import KvsearchError, TextError, named, nearest, quoted
from kvsearch.models.aliases import DEFAULT as DEFAULT_MODEL
from kvsearch.models.load import LoadedModel
from kvsearch.policy_search.executors.cluster import require_ray
from kvsearch.policy_search.executors.spawning import require_main
from kvsearch.policy_search.portfolio import DEFAULT as DEFAULT_PORTFOLIO
from kvsearch.policy_search.samplers import DEFAULT as DEFAULT_SAMPLER
from kvsearch.workloads import SEES

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

OBJECTIVES = ("nll", "bytes", "throughput")
DEFAULT_SPACE = "default"
PROMPT_SPACE = "prompts"  # the default one, and when to compact
ENGINES = ("kvsearch", "tune")
SLOTS = 256.0  # the budget where none is given
PROPOSALS = 6  # of Ray Tune, which is told their number before
MOST_PROPOSALS = 12  # of `--trials auto`
LEAST_SCORED = 64  # tokens of a window


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """One search. `kvsearch.search` says what each option means.

    Lengths are in tokens. Exactly one of the two budgets is set: `budget_slots` in fp16 slots per
    layer, `budget_bytes` in bytes per sequence.
    """

    model: str | LoadedModel = DEFAULT_MODEL
    text: TextOptions = field(default_factory=TextOptions)
    prompts: PromptOptions = field(default_factory=PromptOptions)
    budget_slots: float | None = SLOTS
    budget_bytes: int | None = None
    space: str = DEFAULT_SPACE
    target: str | None = None
    trials: int | None = None
    sampler: "str | BaseSampler" = DEFAULT_SAMPLER
    objectives: tuple[str, ...] = OBJECTIVES[:2]
    warm_start: bool = True
    exclude_method: tuple[str, ...] = ()
    all_methods: bool = False
    portfolio: str = DEFAULT_PORTFOLIO
    seed: int = 0
    score_from: int | None = None
    bench: bool = True
    minutes: float | None = None
    heads: Path | None = None
    measure_heads: bool = False
    dtype: str = "auto"
    device: str = "auto"
    batch: int | None = None
    engine: str = "kvsearch"
    workers: int | None = 0
    gpus_per_evaluator: int = 0
    ray: str | None = None
    out: Path | None = None

    @property
    def most_trials(self) -> int:
        """Free proposals at most: with `auto`, None, they end when nothing is to be gained."""
        if self.trials is not None:
            return self.trials
        return PROPOSALS if self.engine == "tune" else MOST_PROPOSALS

    @property
    def together(self) -> int:
        """Windows, or prompts, that policies start with, and that are one job of several
        evaluators; in Ray Tune, which sees one result per trial, all of them."""
        if self.engine == "tune":
            return self.windows
        if self.prompts:
            return self.prompts.step
        return 1 if self.batch is None else self.batch

    @property
    def space_name(self) -> str:
        """The space that is searched: prompts have one of their own by default."""
        own = bool(self.prompts) and self.space == DEFAULT_SPACE
        return PROMPT_SPACE if own else self.space

    @property
    def grows(self) -> bool:
        """Whether the best policies get more windows than they start with."""
        return self.engine != "tune" and self.windows > 1

    @property
    def windows(self) -> int:
        """Windows, or prompts, that the search may measure a policy on."""
        return self.prompts.contexts if self.prompts else self.text.windows

    def check(self) -> None:
        """Raise a `KvsearchError` for what shows without the model: contradictions, or no Ray."""
        check_budget(self.budget_slots, self.budget_bytes)
        if min(self.most_trials, self.workers or 0, self.gpus_per_evaluator) < 0:
            raise KvsearchError("--trials, --workers and --gpus-per-evaluator cannot be below 0")
        if self.ray is None and self.engine != "tune":
            check_workers(self.workers or 0)
            require_main(self.workers)
        if self.minutes is not None and not 0 < self.minutes < float("inf"):
            raise KvsearchError(f"--minutes must be a number above 0, got {self.minutes:g}")
        check_batch(self.batch)
        check_counts(
            context=self.text.context, windows=self.text.windows,
            report_windows=self.text.report_windows, score_from=self.score_from,
        )  # fmt: skip
        if self.objectives not in (OBJECTIVES[:2], OBJECTIVES):
            raise KvsearchError(
                f"--objectives must be {','.join(OBJECTIVES[:2])} or {','.join(OBJECTIVES)}, "
                f"got {named(','.join(self.objectives))}"
            )
        if self.engine not in ENGINES:
            raise KvsearchError(
                f"unknown engine {quoted(self.engine)}{nearest(self.engine, ENGINES)}"
            )
        if self.engine == "tune" or self.ray is not None:
            require_ray()
        if self.engine == "tune" and self.gpus_per_evaluator > 1:
            raise KvsearchError("--engine tune gives each trial one GPU: no --gpus-per-evaluator")
        if self.target is not None and self.space != DEFAULT_SPACE:
            raise KvsearchError("--target searches a space of its own; leave --space out")
        if self.prompts.report_files and not self.prompts.files:
            raise KvsearchError("--report-prompts is the report part of --prompts; give both")
        if self.prompts:
            self._check_prompts()
        elif self.score_from is not None or self.budget_slots is not None:
            self.first_scored(self.budget_slots or 0.0)

    def _check_prompts(self) -> None:
        check_counts(items=self.prompts.items)
        check_see(self.prompts.see)
        self.prompts.specs()
        _ = self.prompts.records  # which raises what is wrong with them
        given = {
            "--report-text": self.text.report_files, "--extra-text": self.text.extra,
            "--score-from": self.score_from, "--batch": self.batch,
        }  # fmt: skip
        for name, value in given.items():
            if value:
                raise KvsearchError(f"{name} is for a search on a text, not on prompts")

    def first_scored(self, slots: float) -> int:
        """First scored position: by default the first at which a full budget of `slots` matters.

        Raises:
            TextError: fewer than `LEAST_SCORED` tokens of a window would be scored.
        """
        start = max(1, int(slots)) if self.score_from is None else self.score_from
        if not 1 <= start <= self.text.context - LEAST_SCORED:
            raise TextError(
                f"scoring from position {start} leaves fewer than {LEAST_SCORED} tokens of a "
                f"{self.text.context}-token window; raise --context or lower --budget"
            )
        return start


def check_counts(**given: int | None) -> None:
    """Raise a `KvsearchError` for an option that was given and is below 1; None is not given."""
    for name, value in given.items():
        if value is not None and value < 1:
            raise KvsearchError(f"--{name.replace('_', '-')} must be at least 1, got {value}")


def check_see(see: str) -> None:
    """Raise a `KvsearchError` for another word than those of `--see`."""
    if see not in SEES:
        raise KvsearchError(f"--see must be one of {', '.join(SEES)}, got {quoted(see)}")


def check_workers(count: int) -> None:
    """Raise a `KvsearchError` for more processes than this machine can have a use for."""
    cores = os.cpu_count() or 1
    if count > (most := max(8, 4 * cores)):
        raise KvsearchError(
            f"--workers {count} are more processes than the {cores} cores of this machine can run; "
            f"give at most {most}"
        )


def check_batch(batch: int | None) -> None:
    """Raise a `KvsearchError` for less than one window a forward pass."""
    if batch is not None and batch < 1:
        raise KvsearchError(f"--batch must be at least 1 window, got {batch}")
