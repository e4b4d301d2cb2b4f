"""What policies are measured on: windows of a text, or prompts and answers."""

from collections.abc import Sequence
from dataclasses import KW_ONLY
from functools import partial
from math import inf
from os import PathLike
from pathlib import Path

from kvsearch.errors import KvsearchError, TextError, quoted
from kvsearch.options.checks import at_least, one_of, paths, several, texts
from kvsearch.options.declare import ALWAYS, Config, Given, again, option, ordered, part
from kvsearch.workloads import LEAST_TOKENS, SEES, See, TaskSpec, expanded, parse
from kvsearch.workloads.measured_parts import TEXT
from kvsearch.workloads.text import TextLike

Texts = Given[TextLike | Sequence[TextLike] | None, tuple[TextLike, ...]]
Files = Given[str | PathLike[str] | Sequence[str | PathLike[str]], tuple[Path, ...]]
Words = Given[str | Sequence[str], tuple[str, ...]]
_text = partial(option, group="Text")
_prompts = partial(option, group="Prompts")


WINDOWS = 16  # of a text alone, that a search sees
ITEMS = 16  # contexts of a task or file in a search on prompts alone
HEADLINE_WINDOWS = 8  # times as many windows of the report where its headline is undecided, at most
HEADLINE_CONTEXTS = 4  # and times as many contexts that are asked about
FACTS, HIDDEN = "facts", 4  # in a context, all of which are asked for
AFTER = 64  # tokens that a question about a fact and its answer may take


def _tasks(given: str | Sequence[str]) -> tuple[str, ...]:
    return expanded(several(given))


def _weight(given: str) -> tuple[str, float]:
    name, _, value = given.rpartition("=")
    try:
        found = float(value)
    except ValueError:
        found = -1.0
    if not name or not 0 <= found < inf:
        raise KvsearchError(
            f"--weight {quoted(given)} is not NAME=W with a number of at least 0, such as text=2"
        )
    return name, found


def _weights(_: str, given: tuple[str, ...]) -> None:
    for one in given:
        _weight(one)


@ordered
class TextConfig(Config):
    """Which text."""

    text: Texts = _text(
        (),
        "text file, or FILE:START-END in bytes; repeatable. Default: Python's own reference",
        texts,
        metavar="FILE",
        python="; or `Text('...')` for the text itself. Tasks hide their facts in it",
    )

    @property
    def texts(self) -> tuple[Sequence[TextLike], ...]:
        """All texts that are named, for whatever purpose."""
        return (self.text,)


@part
class DatasetConfig(TextConfig):
    """Which text, or one by its name."""

    dataset: str | None = _text(
        None, "wikitext2, pg19, ptb, ... from the Hugging Face hub", instead="text"
    )

    def check(self) -> None:
        """Refuse both."""
        super().check()
        if self.text and self.dataset is not None:
            raise TextError("give --text or --dataset, not both")


@part
class TasksConfig(Config):
    """Which prompts, by name, and what a policy knows of their questions."""

    tasks: Words = _prompts(
        (),
        "answers to prompts, and of a text only where one is named: see `kvsearch tasks`; "
        "repeatable; `ruler` is all of RULER",
        _tasks,
        metavar="NAME[:N][,tokens=N]", flags="--task",
    )  # fmt: skip
    see: See = _prompts(
        "agnostic",
        "whether a question arrives after the context was compressed, or is part of the prompt",
        check=one_of(SEES),
        recorded=ALWAYS,
        python="; `aware` is the latter",
    )

    def specs(self) -> list[TaskSpec]:
        """The tasks; raises a `KvsearchError` for one that there is not."""
        return [parse(spec) for spec in self.tasks]


@part
class PromptsConfig(TasksConfig):
    """Which prompts, by name or in files."""

    prompts: Files = _prompts(
        (),
        "the same on your own prompts (.jsonl, .json, .csv, .parquet), or on a set of the hub: "
        "ruler, loogle, longbench, hf:OWNER/NAME, with :CONFIG and @SPLIT; repeatable",
        paths,
        metavar="FILE",
    )

    @property
    def names_prompts(self) -> bool:
        """Whether a task or a file of prompts is named."""
        return bool(self.tasks or self.prompts)


@part
class MeasuredConfig(PromptsConfig, DatasetConfig):
    """What policies are measured on: windows of a text, prompts and answers, or both."""

    @property
    def windowed(self) -> bool:
        """Whether windows of a text are measured: by default unless there are only prompts."""
        return bool(self.text) or self.dataset is not None or not self.names_prompts


@part
class ItemsConfig(Config):
    """How many prompts."""

    items: int = _prompts(25, "contexts of a task", check=at_least(1))


@ordered
class PromptConfig(Config):
    """How much of a window arrives in one call."""

    _: KW_ONLY
    prompt: int = option(
        0, "tokens that arrive in one call, for policies triggered by a prompt; not scored"
    )

    def check_prompt(self, context: int) -> None:
        """Raise a `KvsearchError` where that is not less than a window of `context` tokens."""
        if not 0 <= self.prompt < context:
            raise KvsearchError(
                f"--prompt {self.prompt} must be at least 0 and below the {context} tokens of a "
                "window; lower it or raise --context"
            )


@part
class BatchConfig(Config):
    """How many windows go through the model at a time."""

    batch: int | None = option(
        None,
        "windows per forward pass  [default: as many as fit on a GPU, 1 on a CPU]",
        check=at_least(1, " window"), group="Measurement",
    )  # fmt: skip


@part
class WorkloadConfig(MeasuredConfig):
    """What a run searches on and reports on."""

    report_text: Texts = _text(
        (), "report on this text instead of on a part of --text", texts, metavar="FILE"
    )
    extra_text: Texts = _text(
        (),
        "check the recommended policy on this text as well; repeatable",
        texts,
        metavar="FILE",
    )
    context: int = _text(1536, "tokens of a window", check=at_least(1))
    text_only: bool = _text(
        False,
        "measure policies on the text alone, and not also on facts that are hidden in it and asked "
        "for later",
    )
    windows: int | None = _text(
        None,
        "windows that the search sees, and beside these as many contexts of facts and prompts "
        "[default: 8, or 16 of a text alone]; fewer where the text is too short. Every policy "
        "starts on one, and the best few get more",
        check=at_least(1),
    )
    report_windows: int = _text(
        2,
        "windows of the report, likewise; methods that are certainly behind are measured on fewer, "
        "and where these leave the headline undecided, its policies on up to eight times as many",
        check=at_least(1),
    )
    report_prompts: Files = _prompts(
        (),
        "report on these prompts instead of on a part of --prompts; once for each of those",
        paths,
        metavar="FILE",
    )
    items: int = again(
        ItemsConfig, "items", default=ITEMS,
        help="contexts of each task or file that the search sees, without a text; the report has "
        "as many others, and up to four times as many where they leave the headline undecided",
    )  # fmt: skip
    score_from: int | None = option(
        None, "first scored position [default: the budget in slots]",
        check=at_least(1), group="Measurement",
    )  # fmt: skip
    weight: Words = option(
        (),
        "how much a workload counts, such as text=2 or facts=0.5: `text`, `facts`, a task, or the "
        "name of a file of prompts; repeatable [default: 1 each]",
        several, check=_weights, metavar="NAME=W", group="Measurement",
    )  # fmt: skip

    def check(self) -> None:
        """Refuse what is for a text beside prompts, and parts of prompts without the others."""
        super().check()
        if self.text_only and self.names_prompts:
            raise KvsearchError(
                "--text-only leaves no room for --task and --prompts; leave one out"
            )
        if not (self.windowed or self.asked):
            raise KvsearchError("every --weight is 0, so nothing is measured; raise one")
        if self.report_prompts and not self.prompts:
            raise KvsearchError("--report-prompts is the report part of --prompts; give both")
        if self.report_prompts and len(self.report_prompts) != len(self.prompts):
            raise KvsearchError(
                f"give --report-prompts once for each --prompts and in their order, got "
                f"{len(self.report_prompts)} for {len(self.prompts)}"
            )
        if self.windowed and self.items != ITEMS:
            raise KvsearchError(
                "--items is for prompts alone; beside a text --windows and --report-windows say "
                "how many contexts there are"
            )
        given = {
            "--report-text": self.report_text, "--extra-text": self.extra_text,
            "--score-from": self.score_from,
        }  # fmt: skip
        for name, value in given.items():
            if not self.windowed and value:
                raise KvsearchError(
                    f"{name} is for a search on a text, not on prompts; give --text as well"
                )

    # -- workloads -----------------------------------------------------------------------------

    @property
    def windowed(self) -> bool:
        """Whether windows of a text are measured: as elsewhere, unless they count nothing."""
        return super().windowed and self.weighs(TEXT) > 0

    @property
    def facts(self) -> bool:
        """Whether facts are hidden in the text and asked for, beside its windows."""
        return not (self.names_prompts or self.text_only) and self.weighs(FACTS) > 0

    @property
    def asked(self) -> bool:
        """Whether questions are asked after a context: of facts, tasks or prompts."""
        return self.names_prompts or self.facts

    def specs(self) -> list[TaskSpec]:
        """The tasks, or the facts where there are none; raises for one that there is not."""
        if not self.facts:
            return super().specs()
        tokens = max(LEAST_TOKENS, self.context - AFTER)
        options = {"facts": HIDDEN, "asks": HIDDEN}
        return [TaskSpec("needle", tokens, options, title=FACTS)]

    def weighs(self, name: str) -> float:
        """How much a workload counts beside others; a task has a weight of its own, too."""
        return dict(map(_weight, self.weight)).get(name, 1.0)

    @property
    def texts(self) -> tuple[Sequence[TextLike], ...]:
        """All texts that are named, for whatever purpose."""
        return (self.text, self.report_text, self.extra_text)

    @property
    def count(self) -> int:
        """Workloads."""
        return self.windowed + self.facts + len(self.tasks) + len(self.prompts)

    @property
    def units(self) -> int:
        """Windows, and prompts of every workload, that the search may measure a policy on."""
        if not self.windowed:
            return self.items
        return self.windows or (WINDOWS // 2 if self.asked else WINDOWS)

    @property
    def searched(self) -> int:
        """The same of all workloads together."""
        return self.units * self.count

    @property
    def longest(self) -> int:
        """Tokens that the model must have positions for, as far as the options say."""
        tokens = [spec.tokens for spec in self.specs()]
        return max([*tokens, self.context if self.windowed else 1])
