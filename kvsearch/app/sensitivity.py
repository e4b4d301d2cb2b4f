"""Sensitivity of layers and losses of KV heads, for budgets and bits: from a file, or measured."""

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from kvsearch.app.aside import aside
from kvsearch.app.evaluators import park
from kvsearch.app.policies import PolicyLike
from kvsearch.app.progress import Shown
from kvsearch.errors import KvsearchError, OutOfMemory, lacks_memory, quoted
from kvsearch.evaluate import head_losses, sensitivity
from kvsearch.evaluate.prices import Estimate
from kvsearch.evaluate.probes import Ask, Probe, here
from kvsearch.evaluate.quality import Evaluator
from kvsearch.knobs import Need, Setting, needs
from kvsearch.methods import METHODS
from kvsearch.policy import HeadLosses, ModelShape
from kvsearch.policy.parts import LEAST
from kvsearch.search.executors import Executor
from kvsearch.search.probing import over
from kvsearch.space import SearchSpace
from kvsearch.text.parts import Tokens

M = TypeVar("M")
FEWEST = 128  # tokens of a window, where memory is short
NAMES = {"layers": "the sensitivity of each layer", "heads": "what each KV head loses"}


@dataclass(frozen=True)
class Sensitivity:
    """The measurements; `layers` is empty and `heads` None where no policy needs them."""

    layers: tuple[float, ...] = ()
    heads: HeadLosses | None = None

    def put_into(self, setting: Setting) -> Setting:
        """The setting with it."""
        return replace(setting, sensitivity=self.layers, heads=self.heads)

    def to_json(self) -> str:
        """The text of a `sensitivity.json`."""
        data: dict[str, Any] = {"unit": "mean 1", "per_layer": self.layers}
        if self.heads is not None:
            data["heads"] = self.heads.plain()
        return json.dumps(data) + "\n"


def of_space(space: SearchSpace) -> frozenset[Need]:
    """What the policies of a space need."""
    return needs({name: axis.choice or () for name, axis in space.axes.items()})


def of_method(policy: PolicyLike) -> frozenset[Need]:
    """What a method needs; policy files hold their own."""
    if not isinstance(policy, str) or policy not in METHODS:
        return frozenset()
    return needs({name: (value,) for name, value in METHODS[policy].knobs.items()})


def read(file: Path, shape: ModelShape) -> Sensitivity:
    """What the `sensitivity.json` of a run holds.

    Args:
        file: the file.
        shape: of the model.

    Raises:
        KvsearchError: it cannot be read, or is of another model.
    """
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        layers = tuple(float(v) for v in data["per_layer"])
        heads = HeadLosses.read(data["heads"]) if data.get("heads") is not None else None
    except OSError as e:
        raise KvsearchError(f"cannot read {file}: {e.strerror or e}") from e
    except (ValueError, TypeError, KeyError, RecursionError) as e:
        raise KvsearchError(f"{file} is no sensitivity.json of a run: {quoted(e)}"[:300]) from e
    fits = len(layers) == shape.layers or (not layers and heads is not None)
    if not fits or not all(LEAST <= v <= 1 / LEAST for v in layers):
        raise KvsearchError(
            f"{file} needs one number above 0 for each of the model's {shape.layers} layers; give "
            "the sensitivity.json of a run on this model"
        )
    if heads is not None and len(heads.slots) != shape.layers * shape.kv_heads:
        raise KvsearchError(
            f"{file} has losses of {len(heads.slots)} KV heads, and the model has "
            f"{shape.layers * shape.kv_heads}; give the sensitivity.json of a run on this model"
        )
    return Sensitivity(layers, heads)


def measure(
    evaluator: Evaluator,
    ids: NDArray[np.int64],
    wanted: frozenset[Need],
    search_tokens: int,
    step: Callable[[str, float], AbstractContextManager[Any]],
    ask: Ask | None = None,
) -> Sensitivity:
    """Measure what is needed, each within its share of a search, or take it from the disk cache.

    Where memory is short, it is measured on fewer tokens.

    Args:
        evaluator: of the model.
        ids: token windows `[W, T]`, of which the first are used.
        wanted: what to measure.
        search_tokens: that the search will evaluate.
        step: opens progress of a title and a total.
        ask: what answers probes of the windows; this process if None.
    """
    shape, T = evaluator.loaded.shape, ids.shape[1]
    layers: tuple[float, ...] = ()
    heads: HeadLosses | None = None
    if "layers" in wanted:
        plan = sensitivity.plan(search_tokens, shape.layers, T)
        some = ids[: plan.windows]
        layers = _as_fits(
            plan.tokens,
            lambda n: sensitivity.kept_or_measured(evaluator, some[:, :n], step, plan.groups, ask),
        )
    if "heads" in wanted:
        how = head_losses.plan(search_tokens, shape, T)
        heads = _as_fits(
            how.tokens,
            lambda n: head_losses.kept_or_measured(evaluator, ids[0, :n], how.direct, step, ask),
        )
    return Sensitivity(layers, heads)


def _as_fits(tokens: int, measured: Callable[[int], M]) -> M:
    """What is `measured` on so many tokens, or on half of them while the device lacks memory."""
    while True:
        try:
            return measured(tokens)
        except (RuntimeError, MemoryError, KvsearchError) as error:
            if not lacks_memory(error):
                raise
            if tokens // 2 < FEWEST:
                raise OutOfMemory(
                    f"layers and heads cannot be measured on {tokens} tokens: {error}; take a "
                    "space whose budgets need neither (--space), or a smaller model"
                ) from error
        tokens //= 2
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def spread(evaluator: Evaluator, executor: Executor, part: str, windows: NDArray[np.int64]) -> Ask:
    """Answers from all evaluators of a run.

    On a CPU the evaluators share its cores, and two thirds of what estimates cost are passes that
    each evaluator would make for itself. So they are made once, here, with all the threads. On a
    GPU the driver's own model is off the device from the first question on, see `park`.

    Args:
        evaluator: the driver's own.
        executor: of the run; all of its slots are free.
        part: name of the text part that has the windows.
        windows: that part `[W, T]`.
    """
    loaded, there = evaluator.loaded, over(executor, part)

    def ask(
        probes: Sequence[Probe], progress: Callable[[], None] = lambda: None
    ) -> list[NDArray[np.float64]]:
        if loaded.device != "cpu":
            park(loaded, executor)
        elif any(isinstance(probe.question, Estimate) for probe in probes):
            return here(evaluator, windows)(probes, progress)
        return there(probes, progress)

    return ask


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
    """The setting with what its policies need, read from a file or measured.

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
    if file is not None:
        return read(file, setting.shape).put_into(setting)
    names = [p for p in policies if of_method(p)]
    if not names:
        return setting
    wanted = frozenset[Need]().union(*(of_method(p) for p in names))
    search_tokens = (len(policies) + 1) * count * length
    size = min(sensitivity.LONG, length)
    ids, where = aside(tokens, count, length, sensitivity.WINDOWS, size)
    what = " and ".join(NAMES[need] for need in sorted(wanted, reverse=True))
    shown.say(
        f"{', '.join(map(str, names))}: measuring {what} {where}; --sensitivity FILE reuses a run's"
    )
    return measure(evaluator, ids, wanted, search_tokens, shown.step).put_into(setting)
