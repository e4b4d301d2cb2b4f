"""Moving keys and queries to another rotary angle (RoPE in the half-split layout)."""

import inspect
from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvsearch.errors import ModelError
from kvsearch.models.shape import body, policy_layers, rotary_candidates, text_config
from kvsearch_kernels.rotary import turned


class Rotary:
    """Rotates vectors by a number of positions.

    Args:
        inv_freq: angle per position of each channel pair, `[R / 2]`; channels beyond `R` of a head
            carry no angle (partial rotary embeddings). Where heads kept different pairs, one row
            for each KV head, `[H, R / 2]`, which the query heads of its group share.
    """

    def __init__(self, inv_freq: Tensor) -> None:
        self.inv_freq = inv_freq.detach().float()
        self._minus = -self.inv_freq
        self._slots: tuple[Tensor, Tensor] | None = None
        self._wide: dict[tuple[torch.device, torch.dtype, bool], Tensor] = {}

    def turn(self, x: Tensor, by: Tensor) -> Tensor:
        """Rotate `x` `[..., N, D]` by `by` positions, `[N]` or broadcastable `[..., N]`.

        Angles are exact (float64), so that the same distance reached from two positions gives the
        same product; the result is rounded once.
        """
        angle = by.to(x.device, torch.float64).unsqueeze(-1) * self._pairs(x, torch.float64)
        kind = torch.promote_types(x.dtype, torch.float32)
        return turned(x, angle.cos().to(kind), angle.sin().to(kind))

    def turn_slots(self, x: Tensor, first: int, *, keep: bool) -> Tensor:
        """`turn` of `x` `[..., N, D]` by slots `first`, `first + 1`, ...

        With `keep`, the angles' tables stay, which an evaluation wants and a deployed cache, whose
        bytes are counted, does not.
        """
        stop = first + x.shape[-2]
        if not keep or self.inv_freq.dim() == 2:
            return self.turn(x, torch.arange(first, stop, device=x.device))
        held = self._slots
        if held is None or held[0].shape[0] < stop or held[0].device != x.device:
            index = torch.arange(max(64, 2 * stop), device=x.device, dtype=torch.float64)
            angle = index.unsqueeze(-1) * self.inv_freq.double().to(x.device)
            held = self._slots = (angle.cos(), angle.sin())
        kind = torch.promote_types(x.dtype, torch.float32)
        return turned(x, *(y[first:stop].to(kind) for y in held))

    def forget(self) -> None:
        """Let go of the tables that `turn_slots` keeps."""
        self._slots = None

    def undo(self, at: Tensor, *xs: Tensor) -> list[Tensor]:
        """Take back the rotation that the model gave `xs` `[..., N, D]` at positions `at`, `[N]` or
        broadcastable `[..., N]`.

        Angles are the model's own: products in fp32, and their cosine and sine in the type of `xs`.
        """
        found, waves = [], dict[tuple[int, ...], tuple[Tensor, Tensor]]()
        for x in xs:
            pairs = self._pairs(x, torch.float32, back=True)
            if pairs.shape not in waves:
                angle = at.to(x.device, torch.float32).unsqueeze(-1) * pairs
                waves[pairs.shape] = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
            wide = x.to(torch.promote_types(x.dtype, torch.float32))
            found.append(turned(wide, *waves[pairs.shape]).to(x.dtype))
        return found

    def _pairs(self, x: Tensor, kind: torch.dtype, *, back: bool = False) -> Tensor:
        """Angles that broadcast to the pairs of `x`: `[R / 2]`, or `[heads, 1, R / 2]`.

        With `back` they are negative.
        """
        found = self._wide.get((x.device, kind, back))
        if found is None:
            found = (self._minus if back else self.inv_freq).to(x.device, kind)
            self._wide[x.device, kind, back] = found
        if found.dim() == 1:
            return found
        return found.repeat_interleave(x.shape[-3] // found.shape[0], 0).unsqueeze(-2)


# -- how a model turns its keys: asked of the model itself, with single tokens -----------------

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
    if "position_ids" not in inspect.signature(body(model).forward).parameters:
        raise ModelError(
            f"{what} needs a model that can be shown positions, and the forward function of "
            f"{type(body(model)).__name__} takes no position_ids; {instead}"
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
