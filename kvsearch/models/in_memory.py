"""A model that is already in memory: what is inside its wrappers, and its identity.

It has no name, so the identity is a hash of its weights.
"""

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from kvsearch.errors import ModelError, lacks_memory, quoted
from kvsearch.models.read import brief
from kvsearch.models.shape import entrance, hooks, inner
from kvsearch.models.vocabulary import rows

MEMORY = "memory:"  # how such a digest begins
WHOLE = 1 << 20  # numbers of a tensor up to which all of them count
SAMPLES = 4096  # spread over a larger one
PROBE = 8  # tokens on which an adapted model and the one inside it are compared


def causal(model: Any) -> Any:
    """The transformers model inside wrappers: of `torch.compile`, of `DataParallel`, of PEFT.

    PEFT puts the layers of most of its methods, LoRA among them, into the model, where they stay in
    effect.

    Raises:
        ModelError: it is no causal language model of transformers, or its adapter works outside of
            the model, as virtual tokens do.
    """
    while (found := inner(model)) is not None:
        if hasattr(model, "peft_config") and "_orig_mod" not in model._modules:
            _require_same(model, found)
        model = found
    if not isinstance(model, PreTrainedModel):
        raise ModelError(f"a {type(model).__name__} is no model of transformers; {_instead(model)}")
    if not model.can_generate():
        raise ModelError(
            f"{type(model).__name__} does not generate text; load a causal language model with "
            "AutoModelForCausalLM"
        )
    return model


def _instead(model: Any) -> str:
    """What to give where a wrapper is not known, or something else."""
    if isinstance(model, str):
        return "load one by its name with kvsearch.load_model"
    inner = model.named_modules() if isinstance(model, nn.Module) else _attributes(model)
    for path, found in inner:
        if isinstance(found, PreTrainedModel) and found.can_generate():
            return f"give the {type(found).__name__} inside it, its attribute {quoted(path)}"
    return "load one with AutoModelForCausalLM"


def _attributes(x: Any) -> Any:
    return getattr(x, "__dict__", {}).items()


def _require_same(model: Any, inner: Any) -> None:
    """Raise a `ModelError` where a PEFT model computes something else than the one inside."""
    for config in model.peft_config.values():
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if config.is_prompt_learning:
            raise ModelError(
                f"the model has a PEFT adapter of type {kind}, which puts virtual tokens before "
                "every text, and policies count the tokens of the text only; give the model "
                "without it, or with a LoRA adapter"
            )
        if getattr(config, "alora_invocation_tokens", None):
            raise ModelError(
                "the model has an activated LoRA adapter, which is in effect behind its invocation "
                "tokens only, and kvsearch does not look for them; give the model without it, or "
                "with a plain LoRA adapter"
            )
    device = entrance(inner)
    if device.type == "meta":
        return  # which `digest` refuses
    ids = torch.arange(PROBE, device=device)[None] % rows(inner)
    model.eval()
    try:
        with torch.inference_mode():
            theirs, mine = (m(input_ids=ids, use_cache=False).logits for m in (model, inner))
        same = torch.allclose(theirs.float(), mine.float(), rtol=1e-3, atol=1e-3)
        why = "with which the model inside computes something else"
    except Exception as error:  # whatever an adapter raises
        if lacks_memory(error):
            raise
        same, why = False, f"with which it cannot be called ({brief(error)})"
    if not same:
        raise ModelError(
            f"the model has a PEFT adapter of type {kind}, {why}; give the model with the adapter "
            "merged (merge_and_unload), or without it"
        )


def require_plain(model: Any, what: str) -> None:
    """Raise a `ModelError` where `what` needs weights, and there are adapters or quantised ones."""
    for module in model.modules():
        if type(module).__module__.startswith("peft."):
            raise ModelError(
                f"{what} needs a model without adapters, and this one has some of PEFT; give what "
                "merge_and_unload() of it returns"
            )
    for name, x in model.state_dict().items():
        if getattr(x, "is_meta", False):
            raise ModelError(
                f"{what} needs weights in memory, and {name} of this model is offloaded; load it "
                "without offloading"
            )
        if not isinstance(x, torch.Tensor) or (x.dim() > 1 and not x.is_floating_point()):
            raise ModelError(
                f"{what} needs floating-point weights, and {name} of this model is quantised; load "
                "it without quantisation"
            )


def digest(model: Any) -> str:
    """`memory:` and a hash over names, shapes, dtypes and values of all parameters.

    Of a tensor with more than `WHOLE` numbers, `SAMPLES` spread over it count.

    Raises:
        ModelError: weights are nowhere, or of a kind that cannot be read.
    """
    away = _offloaded(model)
    state = hashlib.sha256()
    for name, held in sorted(model.state_dict().items()):
        if getattr(held, "is_meta", False) and name not in away:
            raise ModelError(
                f"the weights {name} of the model are on the device 'meta', so nowhere; load it "
                "with from_pretrained"
            )
        try:
            _add(state, name, away[name]() if name in away else held)
        except (RuntimeError, TypeError, NotImplementedError, AssertionError) as error:
            raise ModelError(
                f"the weights {name} of type {type(held).__name__} cannot be read "
                f"({brief(error)}); load the model without sharding or quantisation"
            ) from error
    return MEMORY + state.hexdigest()


def _offloaded(model: Any) -> dict[str, Callable[[], torch.Tensor]]:
    """How to read each weight that accelerate has moved away from a model."""
    found = dict[str, Callable[[], torch.Tensor]]()
    for prefix, module in model.named_modules():
        for hook in hooks(module):
            if (weights := getattr(hook, "weights_map", None)) is None:
                continue
            for name, x in module.named_parameters(recurse=False):
                if x.is_meta:
                    found[f"{prefix}.{name}"] = partial(weights.__getitem__, name)
    return found


def _add(state: Any, name: str, held: Any) -> None:
    """One entry of a state: a tensor, or what a quantised layer keeps instead of one."""
    if isinstance(held, list | tuple):
        for i, part in enumerate(held):
            _add(state, f"{name}.{i}", part)
        return
    if not isinstance(held, torch.Tensor):
        plain = held is None or isinstance(held, bool | int | float | str | torch.dtype)
        state.update(f"{name}\0{held if plain else type(held).__name__}\0".encode())
        return
    if held.is_quantized:
        held = held.dequantize()
    state.update(f"{name}\0{tuple(held.shape)}\0{held.dtype}\0".encode())
    flat = held.detach().reshape(-1)
    if flat.numel() > WHOLE:
        places = torch.linspace(0, flat.numel() - 1, SAMPLES, dtype=torch.float64, device="cpu")
        flat = flat[places.long().to(flat.device)]
    state.update(flat.cpu().contiguous().view(torch.uint8).numpy().tobytes())
