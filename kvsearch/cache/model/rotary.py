"""Moving keys and queries to another rotary angle (RoPE in the half-split layout)."""

import torch
from torch import Tensor

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
