"""What the keys of a model have in common, where policies are stored without it."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from kvsearch.cache.huggingface import capped
from kvsearch.evaluation.evaluator import Evaluator
from kvsearch.model_analysis import key_offsets
from kvsearch.model_analysis.key_offsets import KeyMeans
from kvsearch.models.load import LoadedModel
from kvsearch.policy_space import SearchSpace, Value
from kvsearch.policy_space.methods import Method
from kvsearch.policy_space.portfolio import Portfolio
from kvsearch.session.progress import Shown

KNOB, WANTED = "offset", "scaled"


def needs_offset(values: Mapping[str, Iterable[object]]) -> bool:
    """Whether policies with such values of their knobs are stored without what keys share."""
    return any(value != "none" for value in values.get(KNOB, ()))


def possible(space: SearchSpace, loaded: LoadedModel) -> SearchSpace:
    """The space without offsets, where the model has no use for them."""
    if KNOB not in space.axes or not capped(loaded.model):
        return space
    axes = {name: axis for name, axis in space.axes.items() if name != KNOB}
    return space.model_copy(update={"axes": axes})


def called_for(means: KeyMeans, loaded: LoadedModel) -> bool:
    """Whether policies that a search begins with are stored without what keys share."""
    return means.large and not capped(loaded.model)


def known(loaded: LoadedModel, shown: Shown, *, anew: bool = False) -> tuple[KeyMeans, str]:
    """What the keys have in common, kept or measured, and where that is from."""
    return key_offsets.of_model(Evaluator(loaded), shown.step, anew=anew)


def found(loaded: LoadedModel, shown: Shown) -> KeyMeans:
    """What the keys have in common, kept or measured; says which, and what follows."""
    means, where = known(loaded, shown)
    most = max(share for share, _ in means.shares)
    follows = "starting points below 16 bits subtract it" if means.large else "offsets are searched"
    shown.say(
        f"a head's mean key holds up to {100 * most:.0f} % of the energy of its keys ({where}): "
        f"{follows}"
    )
    return means


def without_offset(points: Portfolio, space: SearchSpace) -> Portfolio:
    """Starting points, stored without what keys have in common where the space has that."""
    return tuple((name, _without(method, space)) for name, method in points)


def _without(method: Method, space: SearchSpace) -> Method:
    knobs: dict[str, Value] = {**method.knobs, KNOB: WANTED}
    params = space.params(knobs)
    there = params is not None and KNOB in params and space.forbidden(params) is None
    return replace(method, knobs=knobs) if there else method
