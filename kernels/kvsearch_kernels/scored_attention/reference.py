"""Meaning of `scored_attention`."""

import torch
from torch import Tensor


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    row_weights: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend from the last `M` of `N` tokens, and sum up what each key received.

    Args:
        q: queries of the newest tokens `[B, Hq, M, D]`.
        k: keys `[B, H, N, D]`, the last `M` are the queries' own.
        v: values `[B, H, N, Dv]`.
        row_weights: `[M]` factor of each query row in the sums.
        scale: factor on the dot products.
        softcap: Gemma 2's `cap * tanh(x / cap)` on the scaled products.

    Returns:
        Output `[B, Hq, M, Dv]` in the type of `q` and received attention `[B, H, N]` in fp32 (fp64
        of fp64): the weighted sum over rows of the probabilities, averaged over the query heads of
        each KV head. Computed in fp32: weights are up to N, and a sum of them does not fit fp16.
    """
    B, Hq, M, D = q.shape
    H, N = k.shape[1], k.shape[2]
    G = Hq // H
    dtype = q.dtype
    q, k, v = (x.to(torch.promote_types(dtype, torch.float32)) for x in (q, k, v))
    s = (q * scale).reshape(B, H, G * M, D) @ k.transpose(-1, -2)
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    if M > 1:
        future = torch.ones(M, M, dtype=torch.bool, device=q.device).triu(1)
        s.view(B, H, G, M, N)[..., N - M :].masked_fill_(future, float("-inf"))
    p = torch.softmax(s, -1)
    out = (p @ v).view(B, Hq, M, -1).to(dtype)
    votes = (row_weights / G).to(p.dtype).expand(G, M).reshape(G * M).expand(B, H, 1, G * M)
    return out, (votes @ p).squeeze(2)
