"""Layer sensitivity for policies that need it outside a search: read from a file, or measured."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kvsearch.app.policies import PolicyLike
from kvsearch.app.progress import Shown
from kvsearch.errors import KvsearchError
from kvsearch.evaluate import sensitivity
from kvsearch.evaluate.quality import Evaluator
from kvsearch.knobs import Setting
from kvsearch.methods import METHODS
from kvsearch.text import beside, windows
from kvsearch.text.parts import Tokens


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
    rest = beside(tokens, count=count, length=length)
    least = min(sensitivity.SHORT, length)
    if rest.ids.size >= least:
        size = min(plan.tokens, rest.ids.size)
        most = max(1, min(plan.windows, rest.ids.size // size))
        ids, where = windows(rest, count=most, length=size), "on text beside the windows"
    else:
        ids = windows(tokens, count=count, length=length)[: plan.windows, : plan.tokens]
        where = f"on the windows themselves: the text has no other {least} tokens in a row"
    shown.say(
        f"{', '.join(names)}: measuring the sensitivity of each layer on {ids.size:,} tokens, "
        f"{where}; --sensitivity FILE reuses a run's"
    )
    found = sensitivity.kept_or_measured(evaluator, ids, shown.step, plan.groups)
    return replace(setting, sensitivity=found)
