"""How a model turns its keys with position: asked of the model itself, with single tokens."""

import inspect
from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvsearch.cache.model.rotary import Rotary
from kvsearch.errors import ModelError
from kvsearch.models.shape import policy_layers, rotary_candidates, text_config

# Queries and keys `[P, H, 1, D]` that each policy layer is given of one token, alone at each of P
# positions; none of a layer without attention.
Seen = Callable[[PreTrainedModel, list[int]], Sequence[Sequence[Tensor]]]

_known: WeakKeyDictionary[PreTrainedModel, list[Tensor]] = WeakKeyDictionary()


def rotaries(model: PreTrainedModel, seen: Seen, what: str, instead: str) -> list[Rotary | None]:
    """The rotation of every policy layer; layers that turn alike share one.

    Args:
        model: it.
        seen: shows it tokens.
        what: needs the rotation, for the message.
        instead: what else there is, likewise.

    Raises:
        ModelError: the model turns its keys in another way, and `what` needs this one.
    """
    shared: list[Rotary] = []
    for inv_freq in frequencies(model, seen, what, instead):
        same = (r for r in shared if torch.equal(r.inv_freq, inv_freq.float()))
        shared.append(next(same, None) or Rotary(inv_freq))
    return list(shared)


def frequencies(model: PreTrainedModel, seen: Seen, what: str, instead: str) -> list[Tensor]:
    """Angle per position of each channel pair, for every policy layer.

    Layers may turn differently, or not at all (then the angles are zero). What is returned was
    seen to turn the model's own queries and keys from position 0 to near and far ones.

    Raises:
        ModelError: as for `rotaries`.
    """
    if model not in _known:
        _known[model] = _find(model, seen, what, instead)
    return _known[model]


def _find(model: PreTrainedModel, seen: Seen, what: str, instead: str) -> list[Tensor]:
    kind = text_config(model.config).model_type
    layers = policy_layers(model.config)
    options = rotary_candidates(model)
    if "position_ids" not in inspect.signature(model.base_model.forward).parameters:
        raise ModelError(
            f"{what} needs a model that can be shown positions, and the forward function of "
            f"{type(model.base_model).__name__} takes no position_ids; {instead}"
        )
    found = [options for _ in layers]
    reach = getattr(text_config(model.config), "max_position_embeddings", None) or 0
    # near first: a model with a table of positions fails there and is not asked beyond its table
    for positions in ([0, 1, 7, 29], [0, 4 * max(reach, 1 << 16) + 3]):
        if all(found):
            found = [
                [f for f in fits if _turns(f, given, positions)]
                for fits, given in zip(found, seen(model, positions), strict=True)
            ]
    if all(found) and not any(bool(fits[0].any()) for fits in found):
        raise ModelError(
            f"{what} needs rotary embeddings, and no layer of this {kind!r} model turns its keys "
            f"by position; {instead}"
        )
    if not all(found):
        layer = next(i for i, fits in zip(layers, found, strict=True) if not fits)
        raise ModelError(
            f"{what} needs rotary embeddings that turn channel c with channel c + D/2 by position "
            f"alone, and layer {layer} of this {kind!r} model does something else; {instead}"
        )
    return [fits[0] for fits in found]


def _turns(inv_freq: Tensor, given: Sequence[Tensor], positions: list[int]) -> bool:
    """Whether `inv_freq` turned what was given at position 0 into what was at the others."""
    by = torch.tensor(positions, device="cpu").view(-1, 1, 1)
    for x in given:
        if 2 * inv_freq.shape[0] > x.shape[-1]:
            return False
        error = (Rotary(inv_freq).undo(by, x)[0] - x[:1]).abs().max()
        if not error < 0.05 * x.abs().max():  # bf16 rounds to 0.015; other angles miss by 1
            return False
    return True
