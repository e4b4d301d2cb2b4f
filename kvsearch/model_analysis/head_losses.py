"""What every KV head of a model loses when it alone keeps less: measured once per model.

Measured on two texts in which something is asked for again (`recall/`: facts in prose and in a
manual, then the same facts in another order), at the tokens that return. On plain text, where
almost nothing returns, heads that retrieve look dispensable, and budgets that follow such a
measurement forget what is asked for later; they lose more on plain text, too
(`studies/2026-11-head-prices`). RazorAttention (arXiv:2407.15891) finds such heads on random tokens
that repeat, DuoAttention (arXiv:2410.10819) on passkeys in long text.

One forward and two backward passes estimate all heads at once (`prices`).
"""

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvsearch.errors import KvsearchError, OutOfMemory, RunError, lacks_memory
from kvsearch.evaluation.evaluator import Evaluator
from kvsearch.files import write_atomic
from kvsearch.model_analysis.price_by_gradient import SINKS, price
from kvsearch.models.disk_cache import cache_folder
from kvsearch.models.load import LoadedModel, max_context
from kvsearch.policy import HeadLosses, Quantizer
from kvsearch.workloads.text import Source, tokenize

SCHEMA = "kvsearch.heads/1"
RECIPE = "recall/1"  # the text and how it is measured; a change of either makes another recipe
TEXTS = ("letters.txt", "manual.txt")
BORDER = "\n---\n"  # before what returns
MOST = 4096  # tokens of the text, where a tokenizer makes many of it
FEWEST = 128  # tokens of the text, where memory is short
STARVED = 1 / 30  # of the text: slots at which heads are compared
SIZES = (1 / 100, 1 / 60, STARVED, 1 / 16, 1 / 8, 1 / 4, 1 / 2)  # of the text

Step = Callable[[str, float], AbstractContextManager[Any]]


@dataclass(frozen=True, eq=False)
class Recall:
    """A text in which something is asked for again.

    Attributes:
        ids: token ids `[T]`.
        first: first token of what returns.
    """

    ids: NDArray[np.int64]
    first: int


def recall_texts(loaded: LoadedModel, most: int = MOST) -> list[Recall]:
    """The texts as the model's tokenizer cuts them; the end of each, up to `most` tokens.

    Args:
        loaded: the model; one with fewer positions gets as many tokens as it has.
        most: tokens of a text.
    """
    most = min(most, max_context(loaded.model.config) or most)
    found = []
    for name in TEXTS:
        text = files("kvsearch.model_analysis").joinpath("recall", name).read_text("utf-8")
        # each alone, also where a tokenizer begins it with a space: `RECIPE` is these tokens
        parts = [tokenize(loaded.tokenizer, Source.of(name, x, "")) for x in text.split(BORDER)]
        lead = parts[0].start
        ids = np.concatenate([part.ids for part in parts])[-(most - len(lead)) :]
        ids = np.array([*lead, *ids], dtype=np.int64)
        found.append(Recall(ids, max(0, len(ids) - parts[1].ids.size)))
    return found


def measure(
    evaluator: Evaluator, texts: Sequence[Recall], progress: Callable[[], None] | None = None
) -> HeadLosses:
    """Estimate the losses of every head: the mean over texts.

    Args:
        evaluator: of the model.
        texts: what is read.
        progress: called after every layer of every text.
    """
    T = min(len(text.ids) for text in texts)
    sizes = sorted({max(SINKS + 4, int(share * T)) for share in SIZES})
    quantizer = Quantizer(group=None, rotate=True)
    found = [
        price(
            evaluator, text.ids, sizes=sizes, quantizer=quantizer, first=text.first,
            progress=progress,
        )
        for text in texts
    ]  # fmt: skip
    exact = HeadLosses(
        heads=evaluator.loaded.shape.kv_heads,
        sizes=tuple(sizes),
        slots=_rows([x.slots for x in found]),
        bits=found[0].bits,
        keys=_rows([x.keys for x in found]),
        values=_rows([x.values for x in found]),
        starved=max(SINKS + 4, int(STARVED * T)),
    )
    return HeadLosses.read(exact.plain())  # the digits of the file: the same policies follow


def of_model(evaluator: Evaluator, step: Step, *, anew: bool = False) -> tuple[HeadLosses, str]:
    """Losses of the heads of a model: shipped, kept on disk, or measured now and kept.

    Where memory is short, they are measured on the last part of the text.

    Args:
        evaluator: of the model.
        step: opens progress of a title and a total.
        anew: measure, whatever is kept.

    Returns:
        The losses, and where they are from, in words.

    Raises:
        OutOfMemory: the device has no room for a few tokens.
    """
    loaded = evaluator.loaded
    kept = _kept(loaded)
    places = () if anew else ((_shipped(loaded), "shipped with kvsearch"), (kept, "kept on disk"))
    for file, where in places:
        with suppress(OSError, KvsearchError):
            return read(file, loaded)[0], where
    with step("losses of the KV heads", len(TEXTS) * loaded.shape.layers) as shown:
        found, tokens = _as_fits(evaluator, shown.advance)
    with suppress(RunError):  # a cache that cannot be written only costs time
        write_atomic(kept, document(loaded, found))
    return found, f"measured now, on {tokens} tokens"


def document(loaded: LoadedModel, found: HeadLosses) -> str:
    """The text of a `heads.json`: the losses, and of which model they are."""
    shape = loaded.shape
    about = {
        "name": loaded.name,
        "digest": loaded.digest,
        "dtype": loaded.dtype,
        "layers": shape.layers,
        "kv_heads": shape.kv_heads,
    }
    data = {"schema": SCHEMA, "recipe": RECIPE, "model": about, "losses": found.plain()}
    return json.dumps(data) + "\n"


def read(file: Path, loaded: LoadedModel) -> tuple[HeadLosses, str | None]:
    """The losses in a `heads.json`, and what to say of them if they are of other weights.

    Args:
        file: written by `kvsearch heads`, by a run, or shared with a policy.
        loaded: the model whose heads they must be.

    Raises:
        KvsearchError: the file is missing or damaged, of another version, or of a model with other
            layers or KV heads.
    """
    remedy = "`kvsearch heads` measures them"
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        written = str(data["schema"]), str(data["recipe"])
        name, digest = str(data["model"]["name"]), data["model"]["digest"]
        found = HeadLosses.read(data["losses"]) if written == (SCHEMA, RECIPE) else None
    except OSError as e:
        raise KvsearchError(f"cannot read {file}: {e.strerror or e}") from e
    except (ValueError, TypeError, KeyError, RecursionError) as e:
        raise KvsearchError(
            f"{file} is no file of head losses ({e!r}); {remedy}".replace("\n", " ")[:300]
        ) from e
    if found is None:
        raise KvsearchError(
            f"{file} holds {written[1]!r} as {written[0]!r}, and this kvsearch reads {RECIPE!r} as "
            f"{SCHEMA!r}; {remedy}"
        )
    shape, theirs = loaded.shape, (len(found.slots) // found.heads, found.heads)
    if theirs != (shape.layers, shape.kv_heads):
        raise KvsearchError(
            f"{file} is of {name}, with {theirs[0]} layers of {theirs[1]} KV heads, and "
            f"{loaded.name} has {shape.layers} of {shape.kv_heads}; {remedy}"
        )
    if digest != loaded.digest:
        return found, (
            f"{file} was measured on other weights ({name}) than those of {loaded.name}; "
            f"taken as the nearest there is: {remedy} anew"
        )
    return found, None


def _shipped(loaded: LoadedModel) -> Path:
    """Where kvsearch brings the losses of a model with it, if it does; dtypes share one file."""
    name = loaded.digest.rpartition(":")[2][:16]
    return Path(str(files("kvsearch.model_analysis").joinpath("heads", f"{name}.json")))


def _kept(loaded: LoadedModel) -> Path:
    """Where losses that were measured are kept: by recipe, weights and dtype."""
    name = loaded.digest.rpartition(":")[2][:16]
    recipe = RECIPE.replace("/", "-")
    return cache_folder() / "heads" / f"{name}-{loaded.dtype}-{recipe}.json"


def _as_fits(evaluator: Evaluator, progress: Callable[[], None]) -> tuple[HeadLosses, int]:
    """Losses and the tokens that they were measured on: half as many while memory is short."""
    texts = recall_texts(evaluator.loaded)
    while True:
        longest = max(len(text.ids) for text in texts)
        try:
            return measure(evaluator, texts, progress), sum(len(text.ids) for text in texts)
        except (RuntimeError, MemoryError) as error:
            if not lacks_memory(error):
                raise
            if longest // 2 < FEWEST:
                raise OutOfMemory(
                    f"the KV heads cannot be measured on {longest} tokens: {error}; give --heads "
                    "FILE, a space whose budgets do not need them (--space), or a smaller model"
                ) from error
        texts = recall_texts(evaluator.loaded, longest // 2)
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def _rows(tables: Sequence[NDArray[np.float64]]) -> tuple[tuple[float, ...], ...]:
    """The mean of tables `[L, H, N]` as a row a head."""
    mean = np.mean(tables, axis=0)
    return tuple(tuple(float(v) for v in row) for row in mean.reshape(-1, mean.shape[-1]))
