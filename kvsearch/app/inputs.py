"""From options to the model, the text and its windows."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from kvsearch.errors import ModelError, TextError, quoted
from kvsearch.models.load import LoadedModel, load_model, require_context
from kvsearch.models.vocabulary import require_ids
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
from kvsearch.workloads.parts import Rows

Say = Callable[[str], None]
Place = TypeVar("Place", str, str | PathLike[str])
SENSITIVITY = 4  # windows for the sensitivity of layers and heads, at most
HEADLINE = 8  # times as many report windows for the headline, at most


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
        fewer: take fewer search windows where the text is too short, and some for sensitivity.
        select_windows: of other text, for the selection; fewer where that text is too short.
        report_windows: windows of the report text; with `fewer`, `HEADLINE` times as many are
            there, where they fit.
    """

    files: tuple[TextLike, ...] = ()
    dataset: str | None = None
    report_files: tuple[TextLike, ...] = ()
    extra: tuple[TextLike, ...] = ()
    context: int = 1536
    windows: int = 1
    fewer: bool = False
    report_windows: int = 2
    select_windows: int = 1


@dataclass(frozen=True, eq=False)
class MeasuredOn:
    """What search, selectW, report and extraN are: windows `[W, T]` of a text, or prompts.

    With `TextOptions.fewer` there are windows `sensitivity`, too: other ones of the search text.

    Attributes:
        described: names, sizes and hashes of search, select and report, for records.
        windows: by name; a prompt with its asks counts as a window.
        report: windows of the report text for every row; those beyond are for the headline.
        select: name of the windows for the selection. It contains their number: a run that is
            resumed with more trials uses more windows, and losses on fewer are kept apart.
        extra: further texts.
    """

    described: dict[str, dict[str, object]]
    windows: Mapping[str, Rows]
    report: int
    select: str
    extra: tuple[Tokens, ...]


def texts(given: TextLike | Sequence[TextLike] | None) -> tuple[TextLike, ...]:
    """One text or several, as a caller gave them."""
    if given is None:
        return ()
    found = (given,) if isinstance(given, str | PathLike | Text) else given
    if not isinstance(found, Sequence) or isinstance(found, bytes | bytearray):
        found = (given,)  # refused below, as what is in a sequence
    for spec in found:
        if not isinstance(spec, str | PathLike | Text):
            raise TextError(
                f"a text is a path, kvsearch.Text(...) for the text itself, or several of these, "
                f"not {quoted(spec)} of type {type(spec).__name__}"
            )
    return tuple(found)


def names(given: str | Sequence[str]) -> tuple[str, ...]:
    """Words with commas between them, or a sequence of words."""
    return tuple(given.split(",")) if isinstance(given, str) else tuple(given)


def several(given: Place | Sequence[Place]) -> tuple[Place, ...]:
    """One name or path, or several."""
    return (given,) if isinstance(given, str | PathLike) else tuple(given)


def require_files(*given: TextLike | Sequence[TextLike] | None) -> None:
    """Texts that are named can be read; seen before the model is loaded, which may take minutes.

    Raises:
        TextError: one of them is missing, is a folder, or is no text.
    """
    for spec in (spec for some in given for spec in texts(some)):
        read_text(spec)


def source(files: tuple[TextLike, ...], dataset: str | None, say: Say) -> Source:
    """The text asked for; without any, the built-in one, and says so."""
    if files and dataset is not None:
        raise TextError("give --text or --dataset, not both")
    if dataset is not None:
        found = read_dataset(dataset, announce=say)
    else:
        found = read_files(files) if files else builtin()
    say(found.announcement)
    return found


def which(given: str | PathLike[str] | LoadedModel) -> str | LoadedModel:
    """A model as a caller gave it: a loaded one, or a name.

    Raises:
        ModelError: it is neither.
    """
    if isinstance(given, LoadedModel):
        return given
    if not isinstance(given, str | PathLike):
        raise ModelError(
            f"a model is a name, a path or a LoadedModel, not a {type(given).__name__}; give "
            "LoadedModel.of(model, tokenizer)"
        )
    return str(given)


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


def kernels(loaded: LoadedModel, say: Say) -> None:
    """Have the kernels that many policies need compiled side by side; on a CPU there are none."""
    if loaded.device.startswith("cuda"):
        from kvsearch_kernels.ahead import compile_ahead

        compile_ahead(torch.device(loaded.device), getattr(torch, loaded.dtype), say)


def tokenized(loaded: LoadedModel, found: Source) -> Tokens:
    """Tokens of a text, all of which the model has.

    Raises:
        TextError: there are none.
        ModelError: the model and its tokenizer do not fit.
    """
    tokens = tokenize(loaded.tokenizer, found)
    require_ids(loaded.model, loaded.tokenizer, tokens.ids, tokens.name, tokens.start)
    return tokens


def text(loaded: LoadedModel, options: TextOptions, say: Say) -> MeasuredOn:
    """Tokenise, split and window the text.

    Raises:
        TextError: it is too short; the sentence says what would fit. Or a report or further text
            has a window in common with the search text.
    """
    tokens = tokenized(loaded, source(options.files, options.dataset, say))
    if options.report_files:
        report = tokenized(loaded, read_files(options.report_files))
        search, chosen_on = cut(tokens, {"search": 0.7, "select": 0.3})
        parts = Parts(search, chosen_on, report)
    else:
        parts = split(tokens)
    _require_room(tokens, parts, options.context)
    T, R = options.context, report_windows(parts.report, options, say)
    headline = max(R, min(HEADLINE * R, fitting(parts.report, T))) if options.fewer else R
    W, own = search_windows(parts.search, options, say)
    S = min(options.select_windows, max(1, parts.select.ids.size // T))
    select = f"select{S}"
    further = tuple(tokenized(loaded, read_text(spec)) for spec in options.extra)
    searched = windows(parts.search, count=W + own, length=T)
    found = {
        "search": searched[:W],
        select: windows(parts.select, count=S, length=T),
        "report": windows(parts.report, count=headline, length=T),
    }
    if own:
        found["sensitivity"] = searched[W:]
    found |= {
        f"extra{i}": windows(t, count=min(R, max(1, fitting(t, T))), length=T)
        for i, t in enumerate(further)
    }
    if options.report_files:
        _require_unseen(tokens, parts.report, found["report"])
    for i, t in enumerate(further):
        _require_unseen(tokens, t, found[f"extra{i}"])
    return MeasuredOn(describe(parts), found, R, select, further)


def _require_unseen(seen: Tokens, own: Tokens, rows: NDArray[np.int64]) -> None:
    """No half of a window `rows` `[W, T]` of a text of its `own` is in the text `seen`."""
    text = seen.ids.tobytes()
    words = rows[:, own.start is not None :].astype(seen.ids.dtype)
    if any(half.tobytes() in text for row in words for half in np.array_split(row, 2)):
        raise TextError(
            f"{own.name} and {seen.name} have text in common, so a figure would be from text that "
            "the search saw; give different ones"
        )


def _require_room(tokens: Tokens, parts: Parts, length: int) -> None:
    """Every part has room for a window; if not, one sentence says what would do for all."""
    shortest = min((parts.search, parts.select, parts.report), key=lambda part: part.ids.size)
    if fitting(shortest, length):
        return
    lead = shortest.start is not None
    own = shortest.text_sha256 == tokens.text_sha256  # not a report text of its own
    whole = tokens.ids.size if own else shortest.ids.size
    enough = math.ceil((length - lead) * whole / shortest.ids.size)
    raise TextError(
        f"{shortest.name} has {shortest.ids.size:,} tokens, fewer than a window of {length:,}; "
        f"give a longer text, of about {enough:,} tokens, or --context {shortest.ids.size + lead}"
    )


def fitting(tokens: Tokens, length: int) -> int:
    """Windows of so many tokens that a text has room for, one beside the other."""
    return tokens.ids.size // (length - (tokens.start is not None))


def report_windows(tokens: Tokens, options: TextOptions, say: Say) -> int:
    """Windows of the report; says so if the text has room for fewer."""
    found = max(1, min(options.report_windows, fitting(tokens, options.context)))
    if found < options.report_windows:
        say(
            f"the report text has room for {found} of {options.report_windows} windows of "
            f"{options.context:,} tokens: intervals are wider"
        )
    return found


def search_windows(tokens: Tokens, options: TextOptions, say: Say) -> tuple[int, int]:
    """Windows of the search, and of the sensitivity beside them; says so if they are fewer."""
    wanted = options.windows
    if not options.fewer:
        return wanted, 0
    fit = fitting(tokens, options.context)
    own = min(SENSITIVITY, fit // 4)
    found = min(wanted, fit - own)
    if 0 < found < wanted:
        wider = (wanted / found) ** 0.5
        say(
            f"the search text has room for {found} of {wanted} windows of {options.context:,} "
            f"tokens: the best policies are compared on {found}, and the uncertainty there is "
            f"{wider:.1f} times that of {wanted}"
        )
    return max(found, 1), own


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
