"""Options of the commands beside `run`: the same parts, and what each has of its own."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, fields
from math import inf
from os import PathLike
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kvsearch.errors import KvsearchError
from kvsearch.options.budget import MOST, BudgetConfig, bytes_of
from kvsearch.options.checks import at_least, path, texts, which, within
from kvsearch.options.declare import Config, Given, Word, again, flags_of, option, ordered, part
from kvsearch.options.model import (
    AnyModel,
    DeviceConfig,
    File,
    HeadLossConfig,
    MeasureHeadsConfig,
    ModelConfig,
    NameConfig,
)
from kvsearch.options.workload import (
    BatchConfig,
    DatasetConfig,
    ItemsConfig,
    MeasuredConfig,
    PromptConfig,
    TasksConfig,
    TextConfig,
    Texts,
    Words,
    WorkloadConfig,
)
from kvsearch.policy import Policy
from kvsearch.workloads.text import TextLike

CONTEXT, LONGEST = 2048, 8192  # tokens of a window by default, and at most without --context
PolicyLike = str | PathLike[str] | Policy
Folder = Given[str | PathLike[str], Path]


def _which(given: Any) -> Any:
    return None if given is None else which(given)


@ordered
class AnyModelConfig(Config):
    """Which model, if any."""

    model: AnyModel = again(NameConfig, "model", default=None, convert=_which)


@ordered
class PolicyConfig(Config):
    """A method, a policy file or a `Policy`."""

    policy: PolicyLike


@ordered
class PoliciesConfig(Config):
    """Methods, policy files or `Policy` objects; one or several."""

    policies: PolicyLike | Sequence[PolicyLike]


ON_TEXT = ("tokens", "context", "windows", "score_from", "prompt", "batch", "nll_out")
ON_PROMPTS = ("see", "items", "seed", "kvpress_out")


@part
class EvaluateConfig(
    BatchConfig, ItemsConfig, MeasuredConfig, PromptConfig, HeadLossConfig, BudgetConfig,
    ModelConfig, PoliciesConfig,
):  # fmt: skip
    """Policies on a text, on prompts and answers, or on both."""

    budget_slots: float | None = again(
        BudgetConfig, "budget_slots", help="size methods to this, in fp16 slots per layer"
    )
    tokens: int | None = option(
        None, "tokens in all [default: windows x context]", check=at_least(1)
    )
    context: int | None = option(
        None, "tokens of a window [default: 2048, or --tokens if less]", check=at_least(1)
    )
    windows: int | None = option(
        None, "windows [default: 1, or tokens / context]", check=at_least(1)
    )
    score_from: int | None = again(WorkloadConfig, "score_from")
    nll_out: File = option(
        None,
        "per-token NLL of the text: policy, window, pos, token, nll",
        path,
        metavar="FILE.parquet",
    )
    seed: int = option(0, "of what tasks draw", group="Prompts")
    kvpress_out: File = option(
        None,
        "also generate the answers to prompts, and write them below DIR as kvpress does",
        path,
        metavar="DIR",
    )

    def check(self) -> None:
        """Refuse what is for a text where none is measured, and what is for prompts likewise."""
        super().check()
        for f in fields(self):
            if f.name in ON_TEXT and not self.windowed:
                missing = "a text: give --text, or leave out --task and --prompts"
            elif f.name in ON_PROMPTS and not self.names_prompts:
                missing = "answers to prompts: give --task or --prompts"
            else:
                continue
            if getattr(self, f.name) != f.default:
                raise KvsearchError(f"{flags_of(f)[0]} is for {missing}")

    @property
    def extent(self) -> tuple[int, int]:
        """Windows and tokens of each, from any of the three options."""
        context, windows = self.context, self.windows
        if context is None:
            total = CONTEXT if self.tokens is None else self.tokens
            context = min(total, LONGEST) if windows is None else total // windows
            if context < 1:
                raise KvsearchError(
                    f"{total} tokens are too few for {windows} windows: lower --windows or raise "
                    "--tokens"
                )
        if windows is None:
            windows = 1 if self.tokens is None else max(1, self.tokens // context)
        return windows, context


@ordered
class NeedConfig(NameConfig):
    """A model whose cache may have to be smaller."""

    _: KW_ONLY
    context: int = option(8192, "tokens of a request", check=at_least(1))
    requests: int = option(1, "at once", check=at_least(1))
    memory: int | None = option(
        None, "of the device, such as 24GB",
        check=within(lambda size: 0 < size <= MOST, "above 0 bytes and at most 2^60"),
        word=Word("integer", bytes_of, (int, str), "a size in bytes"), metavar="BYTES",
    )  # fmt: skip


@part
class BenchConfig(HeadLossConfig, BudgetConfig, DatasetConfig, ModelConfig, PolicyConfig):
    """A policy whose decode speed is measured."""

    context: int = option(2048, "tokens in the cache at the start", check=at_least(1))
    pairs: int = option(5, "timed pairs", check=at_least(1))
    steps: int = option(16, "tokens decoded per half of a pair", check=at_least(1))
    cuda_graphs: bool = option(False, "on a GPU: decode with replays of CUDA graphs, both caches")


def _http(given: Any) -> bool:
    try:
        return urlsplit(given).scheme in ("http", "https")
    except ValueError:  # half a bracket
        return False


@ordered
class VerifyConfig(DeviceConfig, TextConfig, AnyModelConfig, PolicyConfig):
    """A policy that a server is to run."""

    server: str = option(
        "http://localhost:8000", "address of an OpenAI-compatible server",
        check=within(_http, "an address such as http://localhost:8000"), metavar="URL",
    )  # fmt: skip
    _: KW_ONLY
    model: AnyModel = again(
        AnyModelConfig, "model", help="what it serves [default: what it says that it serves]"
    )
    text: Texts = again(TextConfig, "text")
    context: int | None = option(
        None, "tokens of the text that are compared [default: 1024, or what the server takes]",
        check=at_least(2, " tokens"),
    )  # fmt: skip


@ordered
class ExportConfig(
    ItemsConfig, MeasuredConfig, PromptConfig, BudgetConfig, DeviceConfig, PolicyConfig,
):  # fmt: skip
    """A policy for a runtime."""

    to: str = option(
        "transformers", "runtime",
        python=", see `kvsearch.targets`; or `vectors`, a conformance kit for a runtime of one's "
        "own; or `optuna`, the trials of a run folder for optuna-dashboard",
    )  # fmt: skip
    out: File = option(None, "folder [default: beside the policy]", path, flags="-o --out")
    _: KW_ONLY
    strict: bool = option(False, "refuse anything but an exact mapping")
    force: bool = option(False, "overwrite existing files")
    budget_slots: float | None = again(
        BudgetConfig, "budget_slots", help="of a method, in fp16 slots per layer"
    )
    model: AnyModel = again(
        AnyModelConfig, "model",
        help="whose shape counts, and for losses [default: that of the policy's run]",
    )  # fmt: skip
    text: Texts = again(TextConfig, "text")
    context: int = option(
        2048, "tokens that bytes and losses are for", check=at_least(2, " tokens")
    )
    windows: int = option(1, "windows of so many, for losses", check=at_least(1))
    prompt: int = again(PromptConfig, "prompt", help="tokens of it that arrive in one call")
    verify: bool = option(False, "run the runtime on the text and compare")
    device: str = again(DeviceConfig, "device", help="auto, cpu, cuda, cuda:N")


@ordered
class TrainedConfig(BudgetConfig, DatasetConfig, ModelConfig):
    """What is learned from a text, and measured on another one."""

    out: Folder = option("adapted", "folder of the trained model", Path, required=True)
    _: KW_ONLY
    held_out: Texts = option(
        (),
        "text to measure on; repeatable [default: the last tenth of the text]",
        texts,
        metavar="FILE",
    )
    steps: int | None = option(
        None, "optimizer steps [default: 200, or what --minutes allow]", check=at_least(1)
    )
    context: int = option(512, "tokens of a window", check=at_least(1))
    windows: int | None = option(
        None, "held-out windows [default: 8, or as many as there are]", check=at_least(1)
    )

    @property
    def texts(self) -> tuple[Sequence[TextLike], ...]:
        """All texts that are named, for whatever purpose."""
        return (self.text, self.held_out)


@part
class AdaptConfig(PromptConfig, TrainedConfig, PolicyConfig):
    """A policy that a model is trained under."""

    minutes: float | None = option(
        None,
        "of training, at most",
        check=within(lambda minutes: 0 < minutes < inf, "above 0 and finite"),
    )
    batch: int = option(1, "windows per forward pass", check=at_least(1))
    accumulate: int = option(8, "forward passes per step", check=at_least(1))
    lora: bool | None = option(
        None,
        "low-rank additions or all weights [default: additions where channels are gone]",
        flags="--lora/--no-lora",
    )
    rank: int = option(8, "of the additions", check=at_least(1))
    lr: float | None = option(
        None,
        "learning rate [default: 1e-4 with LoRA, else 2e-5]",
        check=within(lambda rate: 0 < rate < 1, "above 0 and below 1"),
    )
    warmup: int = option(20, "steps before the full rate", check=at_least(0))
    save_every: int = option(50, "steps between checkpoints", check=at_least(1))
    channels_only: bool = option(
        False, "train what channels leave, under full attention, whatever the policy evicts"
    )
    seed: int = option(
        0,
        "of the order of windows",
        check=within(lambda seed: 0 <= seed < 2**32, "at least 0 and below 2^32"),  # NumPy's limits
    )


@ordered
class RuleConfig(Config):
    """A rule with weights: `kvzap`."""

    rule: str


@ordered
class LearnConfig(TrainedConfig, RuleConfig):
    """A rule whose weights are fitted."""

    out: Folder = again(TrainedConfig, "out", default="learned", help="a folder, not there yet")
    _: KW_ONLY
    steps: int | None = again(
        TrainedConfig, "steps",
        help="contexts that are learned from [default: 64, or as many as there are]",
    )  # fmt: skip
    windows: int | None = again(
        TrainedConfig, "windows", help="held-out contexts [default: a tenth as many as others]"
    )


@ordered
class PruneConfig(DatasetConfig, ModelConfig, PolicyConfig):
    """A policy whose channels are taken out of a model."""

    out: Folder = option("pruned", "folder of the smaller model", Path, required=True)
    _: KW_ONLY
    text: Texts = again(TextConfig, "text")


@part
class HeadsConfig(MeasureHeadsConfig, ModelConfig):
    """A model whose KV heads are measured."""

    out: File = option(
        None, "write the losses to this file", path, metavar="FILE", flags="-o --out"
    )
    measure_heads: bool = again(
        MeasureHeadsConfig, "measure_heads",
        help="measure, even where they are shipped or kept on disk",
    )  # fmt: skip


@part
class GatesConfig(ItemsConfig, TasksConfig, DatasetConfig, DeviceConfig, AnyModelConfig):
    """Tasks that are tried on a model, if there is one."""

    tasks: Words = again(
        TasksConfig, "tasks",
        help="with --model: these only; repeatable; `ruler` is all of RULER",
    )  # fmt: skip
    items: int = again(ItemsConfig, "items", default=8, help="with --model: contexts of each task")


@part
class CheckConfig(DeviceConfig):
    """Where kernels are tested."""

    device: str = again(DeviceConfig, "device", help="auto, cpu, cuda or cuda:N")
