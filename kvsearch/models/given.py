"""The identity of a model that is already in memory and has no name: a hash of its weights."""

import hashlib
from typing import Any

import torch

from kvsearch.errors import ModelError

MEMORY = "memory:"  # how such a digest begins
WHOLE = 1 << 20  # numbers of a tensor up to which all of them count
SAMPLES = 4096  # spread over a larger one


def digest(model: Any) -> str:
    """`memory:` and a hash over names, shapes, dtypes and values of all parameters.

    Of a tensor with more than `WHOLE` numbers, `SAMPLES` spread over it count.

    Raises:
        ModelError: weights are offloaded, so not in memory.
    """
    if any(p.is_meta for p in model.parameters()):
        raise ModelError(
            "weights of the model are offloaded; load it without offloading, as with "
            "device_map=None or on more devices"
        )
    state = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        state.update(f"{name}\0{tuple(tensor.shape)}\0{tensor.dtype}\0".encode())
        flat = tensor.detach().reshape(-1)
        if flat.numel() > WHOLE:
            places = torch.linspace(0, flat.numel() - 1, SAMPLES, dtype=torch.float64, device="cpu")
            flat = flat[places.long().to(flat.device)]
        state.update(flat.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return MEMORY + state.hexdigest()
