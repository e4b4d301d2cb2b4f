"""The task of a search, and how a proposal becomes a trial before any token is evaluated."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import optuna

from kvsearch.errors import PolicyError
from kvsearch.policy import Policy, check, layout
from kvsearch.policy_search.optuna_study import MakeSampler
from kvsearch.policy_space import SearchSpace, Setting, Value, build
from kvsearch.policy_space.methods import METHODS, Method
from kvsearch.results.records import Kind, Trial

STRONG = ("h2o", "snapkv", "tova")  # published methods that lost least on most texts
KINDS: dict[str, Kind] = {"single": "method", "combined": "combined", "earlier": "earlier"}


@dataclass(frozen=True)
class Task:
    """The task of a search.

    Attributes:
        setting: shape, budget and length of a window.
        score_from: first scored position; before it no cache is full.
        space: where to look.
        trials: free proposals to evaluate, beyond the methods; at most, with `enough`.
        windows: of the search text.
        seed: of the sampler.
        sampler: makes the sampler of one proposal from its seed.
        warm_start: evaluate the published methods first.
        exclude_method: names of methods to leave out of that.
        portfolio: policies that earlier searches found, evaluated before the methods.
        together: windows that a policy starts with, and that the best get at a time (`fidelity`).
        enough: asked with Optuna's study before a free proposal, and true if it may be left out
            and all that would follow.
        speed: modelled decode speed of a policy over the full cache's, as a third objective.
    """

    setting: Setting
    score_from: int
    space: SearchSpace
    trials: int
    seed: int
    sampler: MakeSampler
    windows: int
    warm_start: bool = True
    exclude_method: tuple[str, ...] = ()
    portfolio: tuple[tuple[str, Method], ...] = ()
    together: int = 1
    enough: Callable[[optuna.Study], bool] | None = None
    speed: Callable[[Policy], float] | None = None


def baselines(
    warm_start: bool = True, exclude: tuple[str, ...] = (), on_prompts: bool = False
) -> list[tuple[str, Method]]:
    """Methods that a search starts from, strong ones first.

    Combinations are listed from plain to refined, so they come in reverse.

    Args:
        warm_start: false for none.
        exclude: names to leave out.
        on_prompts: whether there are prompts, and with them methods that compact after one.
    """
    wanted = [
        (n, m)
        for n, m in METHODS.items()
        if warm_start
        and n not in exclude
        and (m.baseline or (on_prompts and str(m.knobs.get("trigger")).startswith("prompt")))
    ]
    combined = [(n, m) for n, m in wanted if m.kind == "combined"]
    single = [(n, m) for n, m in wanted if m.kind == "single"]
    return combined[::-1] + sorted(single, key=lambda nm: nm[0] not in STRONG)


def admitted(
    task: Task,
    number: int,
    name: str,
    kind: Kind,
    knobs: Mapping[str, Value],
    system: dict[str, Any],
) -> Trial:
    """A proposal as a trial: `running` if it may cost an evaluation, else `rejected`.

    Args:
        task: of the search.
        number: Optuna's, or below 0 for a method that the space does not contain.
        name: of the trial.
        kind: of the trial.
        knobs: what was proposed.
        system: what the sampler noted.
    """
    shape, budget = task.setting.shape, task.setting.budget_bytes
    trial = Trial(
        number, name, kind, "running", Policy(name=name), "", params=dict(knobs), system=system
    )
    try:
        if reason := task.space.forbidden(knobs) if number >= 0 else None:
            raise PolicyError(reason)
        policy = build(knobs, task.setting, name=name)
        check(policy, shape, prompt=task.setting.prompt)
        peak = layout(policy, shape).bytes_peak(task.setting.tokens, task.setting.prompt)
        speed = None if task.speed is None else task.speed(policy)
        trial = replace(
            trial, policy=policy, fingerprint=policy.fingerprint(shape.layers), bytes_peak=peak,
            speed=speed,
        )  # fmt: skip
        if budget is not None and peak > budget and kind == "searched":
            raise PolicyError(f"{peak} bytes are over the budget of {budget}")
    except PolicyError as e:
        return replace(trial, state="rejected", error=str(e))
    return trial
