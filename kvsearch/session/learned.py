"""Weights that rules have learned of a model, where policies follow them."""

from dataclasses import replace

from kvsearch.errors import ModelError
from kvsearch.models import learned
from kvsearch.models.load import LoadedModel
from kvsearch.policy_space import Setting
from kvsearch.policy_space.methods import METHODS
from kvsearch.rules import RULES


def learns(policy: object) -> bool:
    """Whether it is a method whose rule has weights; policy files name theirs."""
    method = METHODS.get(policy) if isinstance(policy, str) else None
    rule = RULES.get(str(method.knobs.get("rule"))) if method is not None else None
    return rule is not None and "hidden" in rule.needs


def with_learned(setting: Setting, loaded: LoadedModel) -> Setting:
    """The setting with what rules have learned of the model on this machine."""
    try:
        found = learned.newest(loaded.model)
    except ModelError:  # of a kind that they cannot learn
        found = None
    return replace(setting, learned=found or "")
