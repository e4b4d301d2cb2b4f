"""A published method as a policy, sized by a model's shape: no weights, no text."""

from dataclasses import replace

from kvsearch.app.budget import in_both_units, sized_for
from kvsearch.app.policies import check_names, resolve, values_of
from kvsearch.errors import KvsearchError
from kvsearch.knobs import needs_heads
from kvsearch.knobs.channels import needs
from kvsearch.policy import ModelShape, Policy


def method(
    name: str,
    shape: ModelShape | None,
    slots: float | None,
    size: int | None,
    *,
    context: int,
    prompt: int = 0,
    learned: str | None = None,
) -> Policy:
    """The policy that `kvsearch eval` measures under this name.

    Args:
        name: of a method.
        shape: the model's, or None where no model was named.
        slots: budget in fp16 slots per layer.
        size: in bytes per sequence, instead.
        context: tokens of the stream that the budget is for.
        prompt: of these, tokens that arrive in one call.
        learned: of a method that `learns`, as in `Setting`.

    Raises:
        KvsearchError: there is no model or budget, the budget is too small, or the method follows
            what must be measured of the model.
    """
    check_names((name,), sized=slots is not None or size is not None)
    if shape is None:
        raise KvsearchError(f"method {name} is sized for a model: give --model")
    follows = values_of(name)
    if needs_heads(follows) or needs(follows):
        raise KvsearchError(
            f"method {name} follows what `kvsearch run` measures of a model; export the policy of "
            "a run"
        )
    setting = sized_for(shape, in_both_units(shape, slots, size), context, prompt)
    (policy,) = resolve((name,), replace(setting, learned=learned))
    return policy
