"""Moving keys and queries to another rotary angle (RoPE in the half-split layout)."""

import torch
from torch import Tensor


class Rotary:
    """Rotates vectors by a number of positions.

    Args:
        inv_freq: angle per position of each channel pair, `[R / 2]`; channels beyond `R` of a head
            carry no angle (partial rotary embeddings). Where heads kept different pairs, one row
            for each KV head, `[H, R / 2]`, which the query heads of its group share.
    """

    def __init__(self, inv_freq: Tensor) -> None:
        self.inv_freq = inv_freq.detach().float()
        self.width = 2 * inv_freq.shape[-1]
        self._slots: tuple[Tensor, Tensor] | None = None

    def turn(self, x: Tensor, by: Tensor) -> Tensor:
        """Rotate `x` `[..., N, D]` by `by` positions, `[N]` or broadcastable `[..., N]`.

        Angles are exact (float64), so that the same distance reached from two positions gives the
        same product.
        """
        angle = by.to(x.device, torch.float64).unsqueeze(-1) * self._pairs(x, torch.float64)
        return self._rotate(x, angle)

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
        cos, sin = (y[first:stop].to(x.dtype) for y in held)
        return self._mix(x, cos, sin)

    def forget(self) -> None:
        """Let go of the tables that `turn_slots` keeps."""
        self._slots = None

    def undo(self, x: Tensor, at: Tensor) -> Tensor:
        """Take back the rotation that the model gave `x` at positions `at`, in its own float32."""
        angle = at.to(x.device, torch.float32).unsqueeze(-1) * self._pairs(x, torch.float32)
        return self._rotate(x, -angle)

    def _pairs(self, x: Tensor, kind: torch.dtype) -> Tensor:
        """Angles that broadcast to the pairs of `x`: `[R / 2]`, or `[heads, 1, R / 2]`."""
        found = self.inv_freq.to(x.device, kind)
        if found.dim() == 1:
            return found
        return found.repeat_interleave(x.shape[-3] // found.shape[0], 0).unsqueeze(-2)

    def _rotate(self, x: Tensor, angle: Tensor) -> Tensor:
        return self._mix(x, angle.cos().to(x.dtype), angle.sin().to(x.dtype))

    def _mix(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rot, rest = x[..., : self.width], x[..., self.width :]
        a, b = rot.chunk(2, -1)
        out = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        return torch.cat([out, rest], -1) if rest.shape[-1] else out
