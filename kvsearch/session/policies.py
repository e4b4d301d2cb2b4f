"""Policies by name or file: what `eval` and `bench` are asked to measure."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from os import PathLike, fspath
from pathlib import Path

from kvsearch.errors import KvsearchError, PolicyError, nearest, quoted
from kvsearch.options.budget import BudgetConfig, sized_for
from kvsearch.options.other_commands import PolicyLike
from kvsearch.policy import ModelShape, Policy, check
from kvsearch.policy_space import SearchSpace, Setting, Value, build, needs_heads, portfolio
from kvsearch.policy_space.channels import needs
from kvsearch.policy_space.methods import METHODS, Method


@cache
def named() -> dict[str, Method]:
    """Methods, and the policies that every search begins with, by their names."""
    return {**METHODS, **portfolio.load(portfolio.DEFAULT)}


def begins_search(given: PolicyLike) -> bool:
    """Whether it is the name of a policy that every search begins with."""
    return isinstance(given, str) and given in named() and given not in METHODS


def listed(policies: PolicyLike | Sequence[PolicyLike]) -> tuple[PolicyLike, ...]:
    """One policy or several, as a caller gave them."""
    if isinstance(policies, str | PathLike | Policy):
        return (policies,)
    return tuple(policies)


def is_method(given: str | PathLike[str]) -> bool:
    """Whether this is a method's name, and neither a file nor a folder.

    Raises:
        PolicyError: it is none of the three.
    """
    name = fspath(given)
    if Path(name).exists():
        return False
    if name not in named() and Path(name).suffix != ".json":
        raise PolicyError(_unknown(name))
    return name in named()


def values_of(given: PolicyLike | SearchSpace) -> dict[str, tuple[Value, ...]]:
    """Values of knobs that a method or the policies of a space may have; none of policy files."""
    if isinstance(given, SearchSpace):
        return {name: axis.choice for name, axis in given.axes.items() if axis.choice}
    if not isinstance(given, str) or given not in named():
        return {}
    return {name: (value,) for name, value in named()[given].knobs.items()}


def check_names(policies: Sequence[PolicyLike], *, sized: bool) -> None:
    """Mistakes that show before the model is loaded.

    Args:
        policies: names, files or policies.
        sized: whether there is a budget to size methods to.

    Raises:
        KvsearchError: a name or file is wrong, or a method needs a budget.
    """
    if not policies:
        raise KvsearchError("name at least one method or .json policy file")
    for given in policies:
        if isinstance(given, Policy):
            continue
        name = fspath(given)
        if Path(name).suffix == ".json":
            Policy.from_json(name)
        elif name not in named():
            raise KvsearchError(_unknown(name))
        elif not sized and named()[name].knobs.get("evict", True):
            raise KvsearchError(
                f"method {name} needs a size: give --budget in fp16 slots per layer, or "
                "--budget-bytes"
            )


def prunes(policy: PolicyLike) -> bool:
    """Whether a policy, which `check_names` has seen, removes channels."""
    if isinstance(policy, Policy):
        return policy.channels.active
    if Path(fspath(policy)).suffix == ".json":
        return Policy.from_json(policy).channels.active
    return named()[fspath(policy)].knobs.get("channels", "none") != "none"


def resolve(policies: Sequence[PolicyLike], setting: Setting) -> list[Policy]:
    """Policies for names, files and policies, in order, each with a name; files have their stem.

    Raises:
        KvsearchError: a name or file is wrong.
        PolicyError: the model cannot run one of them, or the budget pays for nothing; it says
            which of them.
    """
    return [_resolved(given, f"policy {i}", setting) for i, given in enumerate(policies)]


def method(
    name: str,
    shape: ModelShape | None,
    budget: BudgetConfig,
    *,
    context: int,
    prompt: int = 0,
    learned: str | None = None,
) -> Policy:
    """A method as the policy that `kvsearch eval` measures, sized by a shape: no weights, no text.

    Args:
        name: of a method.
        shape: the model's, or None where no model was named.
        budget: that it is sized to.
        context: tokens of the stream that the budget is for.
        prompt: of these, tokens that arrive in one call.
        learned: of a method that `learns`, as in `Setting`.

    Raises:
        KvsearchError: there is no model or budget, the budget is too small, or the method follows
            what must be measured of the model.
    """
    check_names((name,), sized=budget.sized)
    if shape is None:
        raise KvsearchError(f"method {name} is sized for a model: give --model")
    follows = values_of(name)
    if needs_heads(follows) or needs(follows):
        raise KvsearchError(
            f"method {name} follows what `kvsearch run` measures of a model; export the policy of "
            "a run"
        )
    setting = sized_for(shape, budget.budget(shape), context, prompt)
    (policy,) = resolve((name,), replace(setting, learned=learned))
    return policy


def resolve_some(
    policies: Sequence[PolicyLike], setting: Setting
) -> tuple[list[Policy], dict[str, str]]:
    """As `resolve`, without the methods that model or budget refuse, where any other remains.

    Returns:
        the policies, and for each method left out, why.
    """
    out, refused = [], dict[str, PolicyError]()
    for i, given in enumerate(policies):
        try:
            out.append(_resolved(given, f"policy {i}", setting))
        except PolicyError as e:
            if isinstance(given, Policy) or fspath(given) not in named():
                raise
            refused[fspath(given)] = e
    if not out:
        raise next(iter(refused.values()))
    return out, {name: str(e).removeprefix(f"{name}: ") for name, e in refused.items()}


def _resolved(given: PolicyLike, unnamed: str, setting: Setting) -> Policy:
    if isinstance(given, Policy):
        policy = given.model_copy(update={"name": given.name or unnamed})
    elif (name := fspath(given)) in named():
        with _about(name):
            knobs = named()[name].knobs
            if name not in METHODS and setting.offset is not None:  # as a search begins with it
                knobs = {**knobs, "offset": "scaled"}
            policy = build(knobs, setting, name=name)
    elif Path(name).suffix == ".json":
        policy = Policy.from_json(name)
        policy = policy.model_copy(update={"name": policy.name or Path(name).stem})
    else:
        raise KvsearchError(_unknown(name))
    with _about(policy.name or unnamed):
        check(policy, setting.shape, prompt=setting.prompt)
    return policy


@contextmanager
def _about(name: str) -> Iterator[None]:
    """Put the policy's name before what is wrong with it: it may be one of many."""
    try:
        yield
    except PolicyError as e:
        raise PolicyError(f"{name}: {e}") from e


def _unknown(name: str) -> str:
    return f"{quoted(name)} is neither a method nor a .json policy file{nearest(name, named())}"
