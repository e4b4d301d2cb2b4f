"""What policies need to know of the model's channels: measured, or read from a run's file."""

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsearch.errors import RunError
from kvsearch.evaluation.evaluator import Evaluator
from kvsearch.model_analysis import channel_importance, layer_ppl_rise
from kvsearch.options.other_commands import PolicyLike
from kvsearch.policy.pruning import Importance
from kvsearch.policy_space import Setting
from kvsearch.policy_space.channels import needs
from kvsearch.session.policies import values_of
from kvsearch.session.progress import Shown
from kvsearch.workloads.text import beside, windows
from kvsearch.workloads.text.windows import Tokens

ROWS, ROW = 4, 512  # windows, and tokens of each, that channels are measured on
SHORT = 512  # tokens of a window, at least, where there are so many


def measure(
    evaluator: Evaluator,
    ids: NDArray[np.int64],
    wanted: frozenset[str],
    step: Callable[[str, float], AbstractContextManager[Any]],
) -> Importance:
    """Measure what is wanted, or take it from the disk cache.

    Args:
        evaluator: of the model.
        ids: token windows `[W, T]`, of which the first are used.
        wanted: see `needs`.
        step: opens progress of a title and a total.

    Raises:
        ModelError: the model's projections are not apart from each other.
    """
    some = ids[:ROWS, :ROW]
    return Importance(
        layer_ppl_rise.kept_or_measured(evaluator, some, step) if "ppl_rise" in wanted else (),
        {
            score: channel_importance.orders(evaluator.loaded, score, some, step)
            for score in sorted(wanted - {"ppl_rise"})
        },
    )


def read(file: Path) -> Importance:
    """What a run has written.

    Raises:
        RunError: the file is damaged.
    """
    try:
        return Importance.read(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as e:
        raise RunError(f"{file} is damaged; remove it and run the same command again") from e


def with_importance(
    setting: Setting,
    policies: Sequence[PolicyLike],
    evaluator: Evaluator,
    tokens: Tokens,
    *,
    count: int,
    length: int,
    shown: Shown,
) -> Setting:
    """The setting with what its policies need to know of the channels.

    Args:
        setting: of the evaluation.
        policies: that are evaluated.
        evaluator: of the model.
        tokens: the text; measured is on a part that no evaluated window covers, if it has one.
        count: evaluated windows.
        length: tokens of each.
        shown: for progress, and a sentence that says where it was measured.
    """
    wanted = frozenset[str]().union(*(needs(values_of(p)) for p in policies))
    if not wanted:
        return setting
    ids, where = _unscored(tokens, count, length, ROWS, min(ROW, length))
    names = ", ".join(str(p) for p in policies if needs(values_of(p)))
    shown.say(f"{names}: measuring {' and '.join(sorted(wanted))} of the channels {where}")
    return replace(setting, importance=measure(evaluator, ids, wanted, shown.step))


def _unscored(
    tokens: Tokens, count: int, length: int, most: int, size: int
) -> tuple[NDArray[np.int64], str]:
    """Token windows `[W, T]` beside the evaluated ones, if they can be, and words for where.

    Args:
        tokens: the text.
        count: evaluated windows.
        length: tokens of each.
        most: windows, at most.
        size: tokens of each, at most.
    """
    rest = beside(tokens, count=count, length=length)
    least = min(SHORT, length)
    if rest.ids.size >= least:
        size = min(size, rest.ids.size)
        fit = min(most, rest.ids.size // size)
        return windows(rest, count=fit, length=size), "on text beside the windows"
    where = f"on the windows themselves: the text has no other {least} tokens in a row"
    return windows(tokens, count=count, length=length)[:most, :size], where
