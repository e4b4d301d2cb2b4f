"""From a text to the windows that search, selection and report measure policies on."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvsearch.errors import TextError
from kvsearch.models.load import LoadedModel
from kvsearch.options.checks import texts
from kvsearch.options.run_config import RunConfig
from kvsearch.options.workload import HEADLINE_WINDOWS
from kvsearch.session.load import Say, source, tokenized
from kvsearch.workloads.measured_parts import Part
from kvsearch.workloads.text import (
    TextLike,
    read_files,
    read_text,
    split,
    windows,
)
from kvsearch.workloads.text.windows import Parts, Tokens, cut

SENSITIVITY = 4  # windows for the sensitivity of layers and heads, at most


@dataclass(frozen=True, eq=False)
class MeasuredOn:
    """What search, selectW, report and extraN are.

    Where the best policies get more windows than others, there are windows `sensitivity`, too:
    other ones of the search text.

    Attributes:
        described: names, sizes and hashes of search, select and report, for records.
        parts: by name.
        report: windows of the report text for every row; those beyond are for the headline.
        select: name of the windows for the selection. It contains their number: a run that is
            resumed with more trials uses more windows, and losses on fewer are kept apart.
        extra: further texts.
        weights: of workloads, where there are windows and prompts.
        left_out: workloads that were asked for and have no use, and why.
    """

    described: dict[str, dict[str, object]]
    parts: Mapping[str, Part]
    report: int
    select: str
    extra: tuple[Tokens, ...]
    weights: Mapping[str, float] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)


def held_out(
    loaded: LoadedModel,
    text: TextLike | Sequence[TextLike] | None,
    dataset: str | None,
    held: TextLike | Sequence[TextLike] | None,
    share: float,
    say: Say,
) -> tuple[Tokens, Tokens]:
    """A text to learn from, and the one given to measure on, or the last `share` of the first."""
    tokens = tokenized(loaded, source(text, dataset, say))
    if held:
        return tokens, tokenized(loaded, read_files(texts(held)))
    first, last = cut(tokens, {"train": 1 - share, "held-out": share})
    return first, last


def parts(loaded: LoadedModel, options: RunConfig, say: Say) -> Parts:
    """The text of a run, tokenised and cut into the splits.

    Raises:
        TextError: it is too short, or the report's is the same.
    """
    tasks = not options.windowed
    tokens = tokenized(loaded, source(options.text, options.dataset, say, tasks=tasks))
    own = options.report_text
    return split(tokens, tokenized(loaded, read_files(own)) if own else None)


def text(
    loaded: LoadedModel, options: RunConfig, say: Say, select_windows: int = 1,
    cut: Parts | None = None,
) -> MeasuredOn:  # fmt: skip
    """The windows of a run.

    Args:
        loaded: the model, for its tokenizer.
        options: which text, and how much of it.
        say: told about whatever is fewer than asked for.
        select_windows: for the selection; fewer where that text is too short.
        cut: `parts`, where they are there already.

    Raises:
        TextError: it is too short; the sentence says what would fit. Or a report or further text
            has a window in common with the search text.
    """
    found = cut or parts(loaded, options, say)
    T = options.context
    _require_room(found, T)
    R = report_windows(found.report, options, say)
    headline = max(R, min(HEADLINE_WINDOWS * R, fitting(found.report, T))) if options.grows else R
    W, own = search_windows(found.search, options, say)
    S = min(select_windows, max(1, found.select.ids.size // T))
    select = f"select{S}"
    further = tuple(tokenized(loaded, read_text(spec)) for spec in options.extra_text)
    searched = windows(found.search, count=W + own, length=T)
    rows = {
        "search": searched[:W],
        select: windows(found.select, count=S, length=T),
        "report": windows(found.report, count=headline, length=T),
    }
    if own:
        rows["sensitivity"] = searched[W:]
    rows |= {
        f"extra{i}": windows(t, count=min(R, max(1, fitting(t, T))), length=T)
        for i, t in enumerate(further)
    }
    if options.report_text:
        _require_unseen(found.whole, found.report, rows["report"])
    for i, t in enumerate(further):
        _require_unseen(found.whole, t, rows[f"extra{i}"])
    made = {name: Part.text(name, ids) for name, ids in rows.items()}
    return MeasuredOn(describe(found), made, R, select, further)


def _require_unseen(seen: Tokens, own: Tokens, rows: NDArray[np.int64]) -> None:
    """No half of a window `rows` `[W, T]` of a text of its `own` is in the text `seen`."""
    text = seen.ids.tobytes()
    words = rows[:, len(own.start) :].astype(seen.ids.dtype)
    if any(half.tobytes() in text for row in words for half in np.array_split(row, 2)):
        raise TextError(
            f"{own.name} and {seen.name} have text in common, so a figure would be from text that "
            "the search saw; give different ones"
        )


def _require_room(parts: Parts, length: int) -> None:
    """Every part has room for a window; if not, one sentence says what would do for all."""
    shortest = min((parts.search, parts.select, parts.report), key=lambda part: part.ids.size)
    if fitting(shortest, length):
        return
    lead = len(shortest.start)
    own = shortest.text_sha256 == parts.whole.text_sha256  # not a report text of its own
    whole = parts.whole.ids.size if own else shortest.ids.size
    enough = math.ceil((length - lead) * whole / shortest.ids.size)
    raise TextError(
        f"{shortest.name} has {shortest.ids.size:,} tokens, fewer than a window of {length:,}; "
        f"give a longer text, of about {enough:,} tokens, or --context {shortest.ids.size + lead}"
    )


def fitting(tokens: Tokens, length: int) -> int:
    """Windows of so many tokens that a text has room for, one beside the other."""
    return tokens.ids.size // max(1, length - len(tokens.start))


def report_windows(tokens: Tokens, options: RunConfig, say: Say) -> int:
    """Windows of the report; says so if the text has room for fewer."""
    found = max(1, min(options.report_windows, fitting(tokens, options.context)))
    if found < options.report_windows:
        say(
            f"the report text has room for {found} of {options.report_windows} windows of "
            f"{options.context:,} tokens: intervals are wider"
        )
    return found


def search_windows(tokens: Tokens, options: RunConfig, say: Say) -> tuple[int, int]:
    """Windows of the search, and of the sensitivity beside them; says so if they are fewer."""
    wanted = options.units
    if not options.grows:
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
