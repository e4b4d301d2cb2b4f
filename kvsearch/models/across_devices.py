"""A model over several devices: contiguous layers on each, about equal bytes of weights.

Hidden states cross from one device to the next between two layers; keys and values stay where
their layer is. `accelerate` does the same for modules of any kind, by device maps; this is for
decoders, without its state.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from kvsearch.errors import ModelError


def placement(model: Any, devices: Sequence[torch.device]) -> dict[str, torch.device]:
    """Device of every module, by name: layers in order, all else on the first.

    Tokens come in and logits go out where a caller has them, on the first device, which gets fewer
    layers for that.

    Args:
        model: a causal language model of transformers.
        devices: where it may be, in order.

    Raises:
        ModelError: there are fewer layers than devices.
    """
    base = model.base_model
    name = f"{model.base_model_prefix}." if base is not model else ""
    if len(base.layers) < len(devices):
        raise ModelError(
            f"a model of {len(base.layers)} layers cannot be spread over {len(devices)} devices"
        )
    sizes = [_bytes(layer) for layer in base.layers]
    whole = _bytes(model)
    ends = accumulate(sizes, initial=whole - sum(sizes))
    where = {
        f"{name}layers.{i}": devices[int((end + size / 2) * len(devices) / whole)]
        for i, (end, size) in enumerate(zip(ends, sizes, strict=False))
    }
    others = [f"{name}{n}" for n, m in base.named_children() if m is not base.layers]
    others += [n for n, m in model.named_children() if m is not base and base is not model]
    return where | dict.fromkeys(others, devices[0])


def spread(model: Any, devices: Sequence[torch.device]) -> Any:
    """Move a model to its devices, see `placement`; calls move their arguments from then on.

    Raises:
        ModelError: there are fewer layers than devices.
    """
    for name, device in placement(model, devices).items():
        module = model.get_submodule(name).to(device)
        module.register_forward_pre_hook(_Moves(device), with_kwargs=True)
    return model


class _Moves:
    """Brings what a module is called with to its device; a cache stays as it is."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, module: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return self._moved(args), {k: self._moved(v) for k, v in kwargs.items()}

    def _moved(self, x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return x.to(self.device, non_blocking=True)
        return tuple(map(self._moved, x)) if type(x) is tuple else x


def _bytes(module: Any) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())
