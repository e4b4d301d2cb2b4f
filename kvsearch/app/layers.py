"""What policies need to know of the model's layers outside a search: read, or measured."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvsearch.app.policies import PolicyLike
from kvsearch.app.progress import Shown
from kvsearch.errors import KvsearchError
from kvsearch.evaluate import harm, importance, sensitivity
from kvsearch.evaluate.quality import Evaluator
from kvsearch.knobs import KNOBS, Setting
from kvsearch.knobs.channels import needs_harm, needs_score
from kvsearch.knobs.vocabulary import Value
from kvsearch.methods import METHODS
from kvsearch.policy.pruning import Importance
from kvsearch.text import beside, windows
from kvsearch.text.parts import Tokens

ROWS, ROW = 4, 512  # windows and tokens of each that the channels of a model are measured on


def needed(policies: Sequence[PolicyLike]) -> list[str]:
    """Names of the methods among `policies` whose layer budgets follow a measured sensitivity.

    Policy files hold their own.
    """
    found = [p for p in policies if isinstance(p, str) and p in METHODS]
    return [n for n in found if METHODS[n].knobs.get("budgets") == "sensitivity"]


def read(file: Path, layers: int) -> tuple[float, ...]:
    """Sensitivity per layer from the `sensitivity.json` of a run.

    Args:
        file: the file.
        layers: of the model.

    Raises:
        KvsearchError: it cannot be read, or is of another model.
    """
    try:
        values = json.loads(file.read_text(encoding="utf-8"))["per_layer"]
        found = tuple(float(v) for v in values)
    except OSError as e:
        raise KvsearchError(f"cannot read {file}: {e.strerror or e}") from e
    except (ValueError, TypeError, KeyError, RecursionError) as e:
        raise KvsearchError(f"{file} is no sensitivity.json of a run: {e!r}"[:300]) from e
    if len(found) != layers or not all(math.isfinite(v) and v > 0 for v in found):
        raise KvsearchError(
            f"{file} needs one number above 0 for each of the model's {layers} layers; give the "
            "sensitivity.json of a run on this model"
        )
    return found


def with_sensitivity(
    setting: Setting,
    policies: Sequence[PolicyLike],
    evaluator: Evaluator,
    tokens: Tokens,
    *,
    count: int,
    length: int,
    file: Path | None,
    shown: Shown,
) -> Setting:
    """The setting with sensitivity per layer, where a policy needs it or a file gives it.

    Args:
        setting: of the evaluation.
        policies: that are evaluated.
        evaluator: of the model.
        tokens: the text; measured is on a part that no evaluated window covers, if it has one.
        count: evaluated windows.
        length: tokens of each.
        file: `sensitivity.json` to read instead.
        shown: for progress, and a sentence that says where it was measured.

    Raises:
        KvsearchError: the file is wrong.
    """
    layers = setting.shape.layers
    if file is not None:
        return replace(setting, sensitivity=read(file, layers))
    names = needed(policies)
    if not names:
        return setting
    plan = sensitivity.plan((len(policies) + 1) * count * length, layers, length)
    ids, where = aside(tokens, count, length, plan.windows, plan.tokens)
    shown.say(
        f"{', '.join(names)}: measuring the sensitivity of each layer on {ids.size:,} tokens, "
        f"{where}; --sensitivity FILE reuses a run's"
    )
    found = sensitivity.kept_or_measured(evaluator, ids, shown.step, plan.groups)
    return replace(setting, sensitivity=found)


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
    """The setting with what methods among `policies` need to know of the model's channels.

    Arguments are as in `with_sensitivity`. Policy files name the channels themselves.

    Raises:
        ModelError: the model has no channels that could be removed one by one.
    """
    knobs = [METHODS[p].knobs for p in policies if isinstance(p, str) and p in METHODS]
    if all(k.get("channels", "none") == "none" for k in knobs):
        return setting
    ids, where = aside(tokens, count, length, ROWS, ROW)
    shown.say(f"measuring the channels of each layer on {ids.size:,} tokens, {where}")
    return replace(setting, importance=importance_for(knobs, evaluator, ids, shown))


def importance_for(
    points: Sequence[Mapping[str, Value]],
    evaluator: Evaluator,
    ids: NDArray[np.int64],
    shown: Shown,
) -> Importance:
    """What `points` need to know of the channels of a model, measured on windows `[W, T]`."""
    default = str(KNOBS["channels.score"].default)
    scores = {needs_score(k, default) for k in points} - {None}
    worth = any(map(needs_harm, points))
    return Importance(
        harm.kept_or_measured(evaluator, ids, shown.step) if worth else (),
        {
            s: importance.orders(evaluator.loaded, s, ids, shown.step)
            for s in sorted(map(str, scores))
        },
    )


def aside(
    tokens: Tokens, count: int, length: int, most: int, size: int
) -> tuple[NDArray[np.int64], str]:
    """At most so many windows of such a size beside the evaluated ones, and where they are.

    Args:
        tokens: the text.
        count: evaluated windows.
        length: tokens of each.
        most: windows wanted.
        size: tokens of each.
    """
    rest = beside(tokens, count=count, length=length)
    least = min(sensitivity.SHORT, length)
    if rest.ids.size >= least:
        size = min(size, rest.ids.size)
        fit = max(1, min(most, rest.ids.size // size))
        return windows(rest, count=fit, length=size), "on text beside the windows"
    where = f"on the windows themselves: the text has no other {least} tokens in a row"
    return windows(tokens, count=count, length=length)[:most, :size], where
