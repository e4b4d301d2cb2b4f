"""From names to things: the model, the text and its windows, the byte budget."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from kvsearch.errors import KvsearchError, ModelError, TextError
from kvsearch.evaluate.quality import Evaluator
from kvsearch.knobs import Setting
from kvsearch.models.load import LoadedModel, load_model, require_context
from kvsearch.search.executors import Executor
from kvsearch.search.executors.inline import Inline
from kvsearch.search.model_work import ModelSession, ModelWork
from kvsearch.text import (
    Source,
    Text,
    TextLike,
    builtin,
    read_dataset,
    read_files,
    read_text,
    split,
    tokenize,
    windows,
)
from kvsearch.text.parts import Parts, Tokens, cut

Say = Callable[[str], None]


@dataclass(frozen=True)
class TextOptions:
    """Which text, and how much of it.

    Attributes:
        files: texts, text files or byte ranges `FILE:START-END`; empty with no dataset is the
            built-in text.
        dataset: a named dataset instead.
        report_files: report on these instead of on a part of `files`.
        extra: further texts for the recommended policy, each by itself.
        context: tokens of a window.
        windows: search windows.
        select_windows: of other text, to choose on; fewer where that text is too short.
        report_windows: windows of the report text.
    """

    files: tuple[TextLike, ...] = ()
    dataset: str | None = None
    report_files: tuple[TextLike, ...] = ()
    extra: tuple[TextLike, ...] = ()
    context: int = 1536
    windows: int = 1
    report_windows: int = 1
    select_windows: int = 1


@dataclass(frozen=True, eq=False)
class TextWindows:
    """Windows `[W, T]` of the texts search, selectW, report and extraN, and what is recorded.

    Attributes:
        parts: the texts that the windows are from.
        windows: by name.
        select: name of the windows to choose on. It tells how many there are: a run that goes on
            with more trials chooses on more, and must not take losses on fewer for those.
        extra: further texts.
    """

    parts: Parts
    windows: dict[str, NDArray[np.int64]]
    select: str
    extra: tuple[Tokens, ...]


def texts(given: TextLike | Sequence[TextLike] | None) -> tuple[TextLike, ...]:
    """One text or several, as a caller gave them."""
    if given is None:
        return ()
    return (given,) if isinstance(given, str | PathLike | Text) else tuple(given)


def names(given: str | Sequence[str]) -> tuple[str, ...]:
    """Words with commas between them, or a sequence of words."""
    return tuple(given.split(",")) if isinstance(given, str) else tuple(given)


def source(files: tuple[TextLike, ...], dataset: str | None, say: Say) -> Source:
    """The text asked for; without any, the built-in one, and says so."""
    if files and dataset:
        raise TextError("give --text or --dataset, not both")
    if dataset:
        found = read_dataset(dataset, announce=say)
    else:
        found = read_files(files) if files else builtin()
    say(found.announcement)
    return found


def model(
    name: str | LoadedModel, *, dtype: str, device: str, context: int, say: Say
) -> LoadedModel:
    """A model that can be run over `context` tokens, loaded where it is not yet.

    Raises:
        TextError: its positions end before that.
        ModelError: it cannot be loaded, or `dtype` or `device` is not that of a loaded one.
    """
    if isinstance(name, LoadedModel):
        loaded = name
        if dtype != "auto" or device != "auto":
            raise ModelError(
                "a model that is loaded already keeps its dtype and device; leave both at 'auto'"
            )
        require_context(loaded.model.config, context)
    else:
        loaded = load_model(name, dtype=dtype, device=device, context=context, announce=say)
    shape = loaded.shape
    say(
        f"model {loaded.name}: {loaded.origin}; {shape.layers} cached layers, {shape.kv_heads} KV "
        f"heads of {shape.head_dim}, {loaded.dtype} on {loaded.device}"
    )
    return loaded


def text(loaded: LoadedModel, options: TextOptions, say: Say) -> TextWindows:
    """Tokenise, split and window the text.

    Raises:
        TextError: it is too short; the sentence says what would fit.
    """
    tokens = tokenize(loaded.tokenizer, source(options.files, options.dataset, say))
    if options.report_files:
        report = tokenize(loaded.tokenizer, read_files(options.report_files))
        search, chosen_on = cut(tokens, {"search": 0.7, "select": 0.3})
        parts = Parts(search, chosen_on, report)
    else:
        parts = split(tokens)
    T, W, R = options.context, options.windows, options.report_windows
    S = min(options.select_windows, max(1, parts.select.ids.size // T))
    select = f"select{S}"
    further = tuple(tokenize(loaded.tokenizer, read_text(spec)) for spec in options.extra)
    found = {
        "search": windows(parts.search, count=W, length=T),
        select: windows(parts.select, count=S, length=T),
        "report": windows(parts.report, count=R, length=T),
    }
    found |= {f"extra{i}": windows(t, count=R, length=T) for i, t in enumerate(further)}
    return TextWindows(parts, found, select, further)


def work(
    loaded: LoadedModel,
    parts: dict[str, NDArray[np.int64]],
    *,
    batch: int,
    workers: int,
    ray: bool,
    device: str,
) -> ModelWork:
    """What evaluators elsewhere load: the driver's model by its name and dtype.

    Args:
        loaded: the driver's own model.
        parts: token windows by name.
        batch: windows per forward pass.
        workers: how many evaluators share this machine's CPU threads; 0 if Ray decides.
        ray: Ray shows every actor its own device.
        device: as asked for; `auto` and `cuda` spread processes over all GPUs.

    Raises:
        ModelError: other processes are asked for, and no name leads to the model.
    """
    if (workers or ray) and loaded.in_memory:
        raise ModelError(
            "other processes cannot load a model that was given in memory; give its name or "
            "folder, or leave out workers, ray and engine"
        )
    devices: tuple[str, ...] = (loaded.device,)
    if ray:
        devices = (loaded.device.partition(":")[0],)
    elif loaded.device != "cpu" and device in ("auto", "cuda"):
        devices = tuple(f"cuda:{i}" for i in range(torch.cuda.device_count()))
    name = str(Path(loaded.name).resolve()) if Path(loaded.name).exists() else loaded.name
    threads = max(1, torch.get_num_threads() // (workers or 2)) if loaded.device == "cpu" else 0
    return ModelWork(name, loaded.dtype, devices, parts, batch, threads)


def executor(
    loaded: LoadedModel, there: ModelWork, *, workers: int, ray: str | None, say: Say
) -> Executor:
    """Where evaluations run: here, in `workers` processes, or on the Ray cluster at `ray`."""
    if not workers and ray is None:
        return Inline(ModelSession(Evaluator(loaded, there.batch), there.parts))
    if ray is None:
        from kvsearch.search.executors.processes import Processes

        say(f"evaluating in {workers} processes on {', '.join(there.devices)}")
        return Processes(there, workers)
    from kvsearch.search.executors.ray_actors import RayActors

    actors = RayActors(there, workers, ray)
    say(f"evaluating on Ray: {actors.slots} actors")
    return actors


def park(loaded: LoadedModel, executor: Executor) -> None:
    """Take the driver's own model off its GPU while evaluators elsewhere need the room.

    It costs host memory for the weights and two copies of them over the bus. What stays on the GPU
    is the driver's CUDA context, a few hundred MB.
    """
    if not isinstance(executor, Inline) and loaded.device != "cpu":
        loaded.model.to("cpu")
        torch.cuda.empty_cache()


def unpark(loaded: LoadedModel) -> None:
    """Bring the driver's model back to where it was loaded."""
    loaded.model.to(loaded.device)


def describe(parts: Parts) -> dict[str, dict[str, object]]:
    """Names, sizes and hashes of the parts, for records."""

    def one(t: Tokens) -> dict[str, object]:
        return {
            "name": t.name,
            "tokens": int(t.ids.size),
            "text_sha256": t.text_sha256,
            "token_sha256": t.token_sha256,
        }

    return {"search": one(parts.search), "select": one(parts.select), "report": one(parts.report)}


@dataclass(frozen=True)
class Budget:
    """Memory for one sequence, in both units.

    Attributes:
        slots: fp16 slots per layer.
        bytes: per sequence, in all layers.
    """

    slots: float
    bytes: int


def check_budget(slots: float | None, size: int | None) -> None:
    """Contradictions that need no model.

    Raises:
        KvsearchError: both units are given, or nothing is left of one.
    """
    if slots is not None and size is not None:
        raise KvsearchError("give --budget in slots or --budget-bytes, not both")
    if slots is not None and not slots > 0:
        raise KvsearchError(f"--budget must be above 0 fp16 slots per layer, got {slots:g}")
    if size is not None and size <= 0:
        raise KvsearchError(f"--budget-bytes must be above 0 bytes per sequence, got {size}")


def budget(loaded: LoadedModel, slots: float | None, size: int | None) -> Budget | None:
    """The budget in both units, or None without one.

    Args:
        loaded: the model, which says what a slot costs.
        slots: fp16 slots per layer.
        size: bytes per sequence, instead.
    """
    check_budget(slots, size)
    if slots is not None:
        return Budget(slots, loaded.shape.budget_bytes(slots))
    return None if size is None else Budget(size / loaded.shape.budget_bytes(1), size)


def setting(loaded: LoadedModel, limit: Budget | None, context: int, prompt: int = 0) -> Setting:
    """What policies are sized for.

    Raises:
        TextError: a window never fills the budget.
    """
    if limit is not None and limit.slots >= context:
        raise TextError(
            f"a window of {context} tokens never exceeds a budget of {limit.slots:g} slots, so "
            "there is nothing to compress; raise --context or lower --budget"
        )
    size = None if limit is None else limit.bytes
    return Setting(loaded.shape, size, context, prompt=prompt)
