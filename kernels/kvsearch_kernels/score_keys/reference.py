"""Meaning of `score_keys`."""

from typing import Literal

import torch
from torch import Tensor


def reference(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    row_weights: Tensor,
    birth: Tensor,
    death: Tensor,
    *,
    first_query: int,
    scale: float,
    softcap: float | None = None,
    reduce: Literal["sum", "max"] = "sum",
) -> Tensor:
    """Sum up, or take the largest of, the weighted probabilities that each key received.

    The second pass after `lifetime_attention`. To score by the last `w` queries only, pass their
    rows of `q` and `lse`, and `first_query` of the first of them.

    Args:
        q: queries `[B, Hq, M, D]`; row i is the query of token `first_query + i`.
        k: keys `[B, H, E, D]`, `H` divides `Hq`.
        lse: log-sum-exp of each query over all keys it saw, `[B, Hq, M]`.
        row_weights: factor of each query row, `[M]`; not negative with `reduce="max"`.
        birth: first query that sees each key, `[E]`, integer.
        death: first query that no longer sees it, `[E]`, integer.
        first_query: token index of the first row of `q`.
        scale: factor on the dot products.
        softcap: Gemma 2's `cap * tanh(x / cap)` on the scaled products.
        reduce: `sum` over query rows, or `max`.

    Returns:
        Scores `[B, H, E]`, the mean over the query heads of each KV head, in fp32 (fp64 of fp64):
        a sum over thousands of rows does not fit 16 bits. A key that no row sees has score 0.
    """
    B, Hq, M, D = q.shape
    H, E = k.shape[1], k.shape[2]
    G = Hq // H
    kind = torch.promote_types(q.dtype, torch.float32)
    q, k, lse, row_weights = (x.to(kind) for x in (q, k, lse, row_weights))
    rows = torch.arange(first_query, first_query + M, device=q.device).unsqueeze(-1)
    visible = (birth <= rows) & (rows < death)
    s = ((q * scale).reshape(B, H, G * M, D) @ k.transpose(-1, -2)).view(B, H, G, M, E)
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    p = (s - lse.view(B, H, G, M, 1)).exp().masked_fill(~visible, 0.0)
    p = p * row_weights.unsqueeze(-1)
    if M == 0:
        return p.sum(-2).mean(2)
    return (p.sum(-2) if reduce == "sum" else p.amax(-2)).mean(2)
