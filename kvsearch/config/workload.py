"""What policies are measured on: windows of a text, or prompts and answers."""

from collections.abc import Sequence
from dataclasses import KW_ONLY
from functools import partial
from os import PathLike
from pathlib import Path

from kvsearch.config.checks import at_least, one_of, paths, several, texts
from kvsearch.config.option import ALWAYS, Config, Given, again, option, ordered, part
from kvsearch.errors import KvsearchError, TextError
from kvsearch.text import TextLike
from kvsearch.workloads import SEES, See, TaskSpec, expanded, parse

Texts = Given[TextLike | Sequence[TextLike] | None, tuple[TextLike, ...]]
Files = Given[str | PathLike[str] | Sequence[str | PathLike[str]], tuple[Path, ...]]
Words = Given[str | Sequence[str], tuple[str, ...]]
_text = partial(option, group="Text")
_prompts = partial(option, group="Prompts, instead of a text")


def _tasks(given: str | Sequence[str]) -> tuple[str, ...]:
    return expanded(several(given))


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
        "answers to prompts instead of a text: see `kvsearch tasks`; repeatable; `ruler` is all "
        "of RULER",
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
    def prompted(self) -> bool:
        """Whether policies are measured on prompts and answers, and not on a text."""
        return bool(self.tasks or self.prompts)


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
class WorkloadConfig(PromptsConfig, DatasetConfig):
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
    windows: int = _text(
        16,
        "windows that the search sees; fewer where the text is too short. Every policy starts on "
        "one, and the best few get more",
        check=at_least(1),
    )
    report_windows: int = _text(
        2,
        "windows of the report; methods that are certainly behind are measured on fewer, and "
        "where these leave the headline undecided, its policies on up to eight times as many",
        check=at_least(1),
    )
    report_prompts: Files = _prompts(
        (),
        "report on these prompts instead of on a part of --prompts; once for each of those",
        paths,
        metavar="FILE",
    )
    items: int = again(
        ItemsConfig, "items", default=16,
        help="contexts of each task or file that the search sees; the report has as many others, "
        "and up to four times as many where they leave the headline undecided",
    )  # fmt: skip
    score_from: int | None = option(
        None, "first scored position [default: the budget in slots]",
        check=at_least(1), group="Measurement",
    )  # fmt: skip

    def check(self) -> None:
        """Refuse what is for a text beside prompts, and parts of prompts without the others."""
        super().check()
        if self.report_prompts and not self.prompts:
            raise KvsearchError("--report-prompts is the report part of --prompts; give both")
        if self.report_prompts and len(self.report_prompts) != len(self.prompts):
            raise KvsearchError(
                f"give --report-prompts once for each --prompts and in their order, got "
                f"{len(self.report_prompts)} for {len(self.prompts)}"
            )
        given = {
            "--report-text": self.report_text, "--extra-text": self.extra_text,
            "--score-from": self.score_from,
        }  # fmt: skip
        for name, value in given.items():
            if self.prompted and value:
                raise KvsearchError(f"{name} is for a search on a text, not on prompts")

    @property
    def texts(self) -> tuple[Sequence[TextLike], ...]:
        """All texts that are named, for whatever purpose."""
        return (self.text, self.report_text, self.extra_text)

    @property
    def count(self) -> int:
        """Workloads of prompts."""
        return len(self.tasks) + len(self.prompts)

    @property
    def searched(self) -> int:
        """Windows, or prompts of all workloads, that the search may measure a policy on."""
        return self.items * self.count if self.prompted else self.windows

    @property
    def longest(self) -> int:
        """Tokens that the model must have positions for, as far as the options say."""
        return max((s.tokens for s in self.specs()), default=1) if self.prompted else self.context
