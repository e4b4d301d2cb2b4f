"""`lifetime_attention` through torch's fused CPU attention, instead of one op after the other."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvsearch_kernels.lifetime_attention.reference import visibility

_fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def why_not(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    birth: Tensor,
    death: Tensor,
    *,
    first_query: int,
    scale: float,
    softcap: float | None = None,
    anchors: Tensor | None = None,
) -> str | None:
    """Why these arguments cannot be taken, or None."""
    if q.device.type != "cpu":
        return f"runs on cpu, got {q.device.type}"
    if k.shape[2] == 0:
        return "needs at least one key"
    if softcap is not None:
        return f"has no softcap, got {softcap}"
    if not q.is_floating_point():
        return f"takes floating-point numbers, got {q.dtype}"
    return None


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    birth: Tensor,
    death: Tensor,
    *,
    first_query: int,
    scale: float,
    softcap: float | None = None,
    anchors: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Same arguments and meaning as the reference."""
    if (more := q.shape[-1] - v.shape[-1]) != 0:  # zeros change no product
        q, k, wide = (
            pad(q, (0, max(0, -more))),
            pad(k, (0, max(0, -more))),
            pad(v, (0, max(0, more))),
        )
        out, lse = forward(
            q, k, wide, birth, death, first_query=first_query, scale=scale, anchors=anchors
        )
        return out[..., : v.shape[-1]], lse
    B, Hq, M, D = q.shape
    dtype = q.dtype
    q, k, v = (x.to(torch.promote_types(dtype, torch.float32)) for x in (q, k, v))
    H = k.shape[1]
    G = Hq // H
    rows = torch.arange(first_query, first_query + M, device="cpu")
    plain = anchors is None
    everything = plain and bool(birth.max() <= first_query) and bool(death.min() >= first_query + M)
    if (
        plain
        and not everything
        and k.shape[2] == M
        and torch.equal(birth, rows)
        and bool(death.min() >= first_query + M)
    ):  # plain causal attention has a path of its own that skips half of the work
        out, lse = _fused(*_shared(q, k, v), 0.0, True, scale=scale)
        return out.reshape(B, Hq, M, D).to(dtype), lse.reshape(B, Hq, M)
    if everything:  # the group's queries are rows of one head
        out, lse = _fused(q.reshape(B, H, G * M, D), k, v, 0.0, False, scale=scale)
        return out.reshape(B, Hq, M, D).to(dtype), lse.reshape(B, Hq, M)
    visible = visibility(birth, death, anchors, first_query, M)
    mask = torch.zeros(visible.shape, dtype=q.dtype, device="cpu").masked_fill_(
        ~visible, float("-inf")
    )
    out, lse = _fused(*_shared(q, k, v), 0.0, False, attn_mask=mask[None, None], scale=scale)
    out, lse = out.reshape(B, Hq, M, D), lse.reshape(B, Hq, M)
    blind = ~visible.any(-1)
    if bool(blind.any()):
        out = out.masked_fill(blind.unsqueeze(-1), 0.0)
        lse = lse.masked_fill(blind, float("-inf"))
    return out.to(dtype), lse


def _shared(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each group of query heads as a sequence of its own; keys and the mask are not repeated."""
    group, heads = q.shape[1] // k.shape[1], k.shape[0] * k.shape[1]
    keys, values = (
        x.reshape(heads, 1, *x.shape[2:]).expand(heads, group, *x.shape[2:]) for x in (k, v)
    )
    return q.reshape(heads, group, *q.shape[2:]), keys, values
