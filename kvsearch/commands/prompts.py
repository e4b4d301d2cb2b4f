"""Methods and policy files on prompts and answers: `kvsearch eval --task` and `--prompts`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvsearch.commands.kvpress_results import Predicted, predicted, require_prompts, write
from kvsearch.config.budget import Budget
from kvsearch.config.commands import EvaluatePromptsConfig
from kvsearch.config.function import takes
from kvsearch.errors import KvsearchError
from kvsearch.evaluation.answers import Answers, answered, answers, fits, greedy_of
from kvsearch.evaluation.measurement import kept
from kvsearch.evaluation.quality import Evaluator
from kvsearch.files import require_writable
from kvsearch.knobs import Setting
from kvsearch.policy import Policy, layout
from kvsearch.records import Interval, Kept, plain
from kvsearch.session import inputs
from kvsearch.session.self_check import self_check
from kvsearch.session.session import Session
from kvsearch.session.workloads import Worth, bare, from_tasks, groups, own_answers, say_own
from kvsearch.stats import clustered
from kvsearch.text import split, tokenize
from kvsearch.workloads import Prompts, See, TaskSpec
from kvsearch.workloads.encode import items_of
from kvsearch.workloads.files import read_all
from kvsearch.workloads.parts import require_names


@dataclass(frozen=True, kw_only=True)
class Asked(Kept):
    """One policy on one workload: what it keeps of it, and its bytes.

    Attributes:
        policy: its name.
        nll: mean over asks of the answers' NLL, nats per token.
        bytes_peak: exact, between calls, for the longest item.
        bytes_prompt, bytes_resident: of the real tensors, after the prompt and at the end of the
            longest item.
        slots16: `bytes_peak` in fp16 slots per layer.
        within_budget: whether `bytes_peak` is at most the budget; None without one.
        seconds: wall time.
    """

    policy: str
    nll: float
    bytes_peak: int
    bytes_prompt: int
    bytes_resident: int
    slots16: float
    within_budget: bool | None
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Known(Worth):
    """What a workload is for this model, and what its context is worth.

    Attributes:
        name: of the task or file.
        see: `agnostic` or `aware`.
        items, asks: how many.
        own: asks whose reference is the full cache's own answer, for want of another.
        tokens: of the longest sequence.
        digest: SHA-256 of its tokens.
        full_exact: share of answers that the full cache gives.
    """

    name: str
    see: See
    items: int
    asks: int
    own: int
    tokens: int
    digest: str
    full_exact: float


@dataclass(frozen=True)
class PromptsResult:
    """What an evaluation on prompts measured.

    Attributes:
        rows: a policy on a workload each, workload by workload.
        workloads: what each is for this model.
        model: name, digest, dtype and device.
        left_out: methods without a row, which model or budget refuses, and why.
        folders: in kvpress' form, where they were asked for.
        self_check: a sentence, if what is scored is not what a deployed model sees.
    """

    rows: list[Asked]
    workloads: list[Known]
    model: dict[str, str]
    left_out: dict[str, str] = field(default_factory=dict)
    folders: list[Path] = field(default_factory=list)
    self_check: str = ""

    def document(self) -> dict[str, Any]:
        """What `kvsearch eval --json` prints."""
        return {
            "model": self.model, "workloads": plain(self.workloads), "results": plain(self.rows),
            "left_out": self.left_out, "folders": [str(f) for f in self.folders],
            "self_check": self.self_check,
        }  # fmt: skip


@takes(EvaluatePromptsConfig)
def evaluate_prompts(config: EvaluatePromptsConfig) -> PromptsResult:
    """Measure policies on prompts and answers, paired with the full cache.

    Returns:
        A row per workload and policy, and what each workload is for this model.

    Raises:
        KvsearchError: something that the caller can mend, in one sentence.
    """
    session = Session(config, config.policies)
    specs, see, kvpress_out = config.specs(), config.see, config.kvpress_out
    records = read_all(config.prompts)
    if not specs and not records:
        raise KvsearchError("give a task or a file of prompts")
    require_names([*(spec.label for spec in specs), *records])
    least = max((spec.tokens for spec in specs), default=1)
    loaded, shown = session.load(context=least), session.shown
    for name, some in records.items():
        say_own(shown, name, some)
    asked = [
        *_made(session, specs),
        *(items_of(loaded, name, rows, see, greedy_of(loaded)) for name, rows in records.items()),
    ]
    if kvpress_out is not None:
        require_prompts(asked)
        require_writable(kvpress_out / "config.yaml")
    fault = self_check(loaded, asked, records, shown)
    evaluator, rows, known = Evaluator(loaded), list[Asked](), list[Known]()
    generated = list[Predicted]()
    left_out: dict[str, str] = {}
    for workload in asked:
        budget = config.budget(loaded.shape)
        setting = session.setting(workload.longest, workload.prompt, prompts=True)
        setting = session.measured(setting)
        chosen, refused = session.some_policies(setting)
        left_out |= refused
        passes = (len(chosen) + 2) * (1 if kvpress_out is None else 2)
        with shown.step(workload.name, passes * len(workload.items)) as step:
            few = fits(evaluator, workload)
            full = answers(
                evaluator, Policy(name="full"), workload, keep=few, progress=step.advance
            )
            log = full.log if few else None
            without = bare(workload, loaded)
            empty = answers(evaluator, Policy(), without, resident=False, progress=step.advance)
            about = _known(workload, full, empty, own_answers(records.get(workload.name, ())))
            known.append(about)
            if not about.passes:
                shown.say(
                    f"{workload.name}: {loaded.name} does not need the context for these answers "
                    f"(NLL {about.full:.2f} with it, {about.empty:.2f} without): shares lost say "
                    "nothing here"
                )
            for policy in chosen:
                found = answers(evaluator, policy, workload, full=log, progress=step.advance)
                rows.append(_row(workload, policy, found, full, about, setting, budget))
            if kvpress_out is not None:
                for policy in [Policy(name="full"), *(p for p in chosen if p.name != "full")]:
                    ratio = _saved(policy, setting)
                    generated.append(
                        predicted(evaluator, policy, workload, ratio, progress=step.advance)
                    )
    folders = list[Path]()
    if kvpress_out is not None:
        folders = write(kvpress_out, loaded.name, loaded.device, see, generated)
    return PromptsResult(rows, known, inputs.about(loaded), left_out, folders, fault)


def _saved(policy: Policy, setting: Setting) -> float:
    """Share of the full cache's bytes that a policy saves at its peak."""
    mine, full = (
        layout(p, setting.shape).bytes_peak(setting.tokens, setting.prompt)
        for p in (policy, Policy())
    )
    return 1 - mine / full


def _made(session: Session[EvaluatePromptsConfig], specs: Sequence[TaskSpec]) -> list[Prompts]:
    """The prompts of tasks, of the part that no search sees."""
    if not specs:
        return []
    loaded, config = session.loaded, session.config
    found = inputs.source(config.text, None, session.shown.say, tasks=True)
    prose = split(tokenize(loaded.tokenizer, found)).report
    return from_tasks(loaded, specs, prose, config.see, config.items, config.seed)


def _known(workload: Prompts, full: Answers, empty: Answers, own: int) -> Known:
    return Known(
        **vars(Worth.of(workload, full, empty)),
        name=workload.name,
        see=workload.see,
        items=len(workload.items),
        asks=workload.asks,
        own=own,
        tokens=workload.longest,
        digest=workload.digest,
        full_exact=float(full.exact.mean()),
    )


def _row(
    workload: Prompts,
    policy: Policy,
    found: Answers,
    full: Answers,
    worth: Worth,
    setting: Setting,
    budget: Budget | None,
) -> Asked:
    gap = clustered(found.nll - full.nll, groups(workload))
    scale = worth.nats if worth.nats > 0 else float("nan")
    lost = Interval(gap.mean / scale, gap.lo / scale, gap.hi / scale)
    mine, whole = (answered(workload, x) for x in (found, full))
    peak = layout(policy, setting.shape).bytes_peak(setting.tokens, setting.prompt)
    return Asked(
        **vars(kept(workload.name, lost, mine, whole)),
        policy=policy.name or "",
        nll=float(found.nll.mean()),
        bytes_peak=peak,
        bytes_prompt=found.bytes_prompt,
        bytes_resident=found.bytes_end,
        slots16=peak / setting.shape.budget_bytes(1),
        within_budget=None if budget is None else peak <= budget.bytes,
        seconds=found.seconds,
    )
