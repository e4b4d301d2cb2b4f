"""Retention rules: which slots stay when a layer is full. A new one is a file and a line here.

Other packages add theirs by an entry point of the group `kvsearch.rules` (`kvsearch.extensions`).

Importing this package imports no torch; scorers import it when they are made.
"""

from typing import Any

from pydantic import ValidationError

from kvsearch.errors import nearest, quoted
from kvsearch.extensions import extend
from kvsearch.frozen import why
from kvsearch.rules.attention import Attention
from kvsearch.rules.base import Need, Place, Rule, Scorer, Segment, Slots, ranked_by
from kvsearch.rules.chunks import Chunks
from kvsearch.rules.critical import Critical
from kvsearch.rules.defensive import Defensive
from kvsearch.rules.expected_attention import ExpectedAttention
from kvsearch.rules.key_norm import KeyNorm
from kvsearch.rules.keydiff import KeyDiff
from kvsearch.rules.kvzap import KVzap
from kvsearch.rules.lagkv import LagKV
from kvsearch.rules.random import Random
from kvsearch.rules.redundancy import Redundancy
from kvsearch.rules.reread import Reread
from kvsearch.rules.value_attention import ValueAttention

__all__ = [
    "RULES",
    "Attention",
    "Chunks",
    "Critical",
    "Defensive",
    "ExpectedAttention",
    "KVzap",
    "KeyDiff",
    "KeyNorm",
    "Need",
    "Place",
    "Random",
    "Redundancy",
    "Reread",
    "Rule",
    "Scorer",
    "Segment",
    "Slots",
    "ValueAttention",
    "json_schema",
    "presets",
    "ranked_by",
    "read",
]

RULES: dict[str, type[Rule]] = {
    "attention": Attention,
    "value-attention": ValueAttention,
    "key-norm": KeyNorm,
    "keydiff": KeyDiff,
    "expected-attention": ExpectedAttention,
    "lagkv": LagKV,
    "random": Random,
    "critical": Critical,
    "chunks": Chunks,
    "redundancy": Redundancy,
    "defensive": Defensive,
    "reread": Reread,
    "kvzap": KVzap,
}


def _wrong(name: str, rule: Any) -> str | None:
    if not (isinstance(rule, type) and issubclass(rule, Rule)):
        return f"it is no class of kvsearch.rules.Rule: {quoted(rule)}"
    own = rule.model_fields["name"].default
    return None if own == name else f"the rule calls itself {quoted(own)}"


extend(RULES, "rules", _wrong)
DEFAULT = "attention"  # of data that name no rule, as earlier files do


def read(data: Any) -> Any:
    """The rule that plain data describe; data that are no mapping are returned unchanged.

    Raises:
        ValueError: unknown name.
    """
    if not isinstance(data, dict):
        return data
    name = data.get("name", DEFAULT)
    if not isinstance(name, str) or name not in RULES:
        raise ValueError(f"rule.name: unknown rule {quoted(name)}{nearest(name, RULES)}")
    try:
        return RULES[name].model_validate(data)
    except ValidationError as e:  # its path would be lost on the way up
        first = e.errors()[0]
        path = ".".join(["rule", *(str(p) for p in first["loc"])])
        raise ValueError(f"{path}: {why(first)}") from e


def json_schema() -> dict[str, Any]:
    """The JSON schema of what `read` takes: one rule, told from others by its name."""
    found = []
    for name, rule in RULES.items():
        one = rule.model_json_schema()
        one["properties"]["name"]["const"] = name
        if name != DEFAULT:
            one["required"] = [*one.get("required", ()), "name"]
        found.append(one)
    return {"oneOf": found}


def presets() -> dict[str, Rule | None]:
    """Named points of all rules, as a search reaches them; `none` goes by age.

    The name of a rule itself is its plain base, with the defaults of all fields.
    """
    found: dict[str, Rule | None] = {"none": None}
    for own_name, rule in RULES.items():
        found[own_name] = rule.model_validate({})
        for name, fields in rule.presets.items():
            found[name] = rule.model_validate(fields)
    return found


def feature_names() -> tuple[str, ...]:
    """Names of all rules' features, each once, in the order of the table."""
    rules = RULES.values()
    return tuple(dict.fromkeys(n for r in rules for n in (*r.feature_names, *r.axes.values())))
