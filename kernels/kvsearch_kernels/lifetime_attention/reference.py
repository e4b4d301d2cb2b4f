"""Meaning of `lifetime_attention`."""

import torch
from torch import Tensor


def reference(
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
    """Attend with one lifetime per key instead of a mask per pair.

    Args:
        q: queries `[B, Hq, M, D]`; row i is the query of token `first_query + i`.
        k: keys `[B, H, E, D]`, `H` divides `Hq`.
        v: values `[B, H, E, Dv]`.
        birth: first query that sees each key, `[E]`, integer.
        death: first query that no longer sees it, `[E]`, integer.
        first_query: token index of the first row of `q`.
        scale: factor on the dot products.
        softcap: Gemma 2's `cap * tanh(x / cap)` on the scaled products.
        anchors: AnLLM's isolation of anchors (arXiv:2402.07616): token index of each key that is an
            anchor, -1 of the others, `[E]`, integer. A row whose token is an anchor sees no earlier
            anchor. Which keys an anchor summarises is a matter of `death`.

    Returns:
        Output `[B, Hq, M, Dv]` in the type of `q` and log-sum-exp `[B, Hq, M]` in fp32 (fp64 of
        fp64); computed in fp32, and rounded once: in bf16 the probabilities of a row would add up
        to anything between 0.94 and 1.06. A row that sees no key is zero with a log-sum-exp of
        minus infinity.
    """
    B, Hq, M, D = q.shape
    H = k.shape[1]
    dtype = q.dtype
    q, k, v = (x.to(torch.promote_types(dtype, torch.float32)) for x in (q, k, v))
    visible = visibility(birth, death, anchors, first_query, M)
    s = (q * scale).reshape(B, H, Hq // H * M, D) @ k.transpose(-1, -2)
    s = s.view(B, Hq, M, -1)
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    s = s.masked_fill(~visible, float("-inf"))
    lse = s.logsumexp(-1)
    p = (s - lse.clamp_min(torch.finfo(s.dtype).min).unsqueeze(-1)).exp()
    out = p.view(B, H, Hq // H * M, -1) @ v
    return out.view(B, Hq, M, -1).to(dtype), lse


def isolated_rows(anchors: Tensor, first_query: int, rows: int) -> Tensor:
    """Which query rows are anchors, `[M]` bool: those whose own key is among `anchors`."""
    at = anchors.long() - first_query
    flags = torch.zeros(rows + 1, dtype=torch.bool, device=anchors.device)
    # not torch.isin: that waits for the device
    return flags.scatter_(0, torch.where((at >= 0) & (at < rows), at, rows), True)[:rows]


def visibility(
    birth: Tensor, death: Tensor, anchors: Tensor | None, first_query: int, rows: int
) -> Tensor:
    """Which keys each row sees, `[M, E]`."""
    every = torch.arange(first_query, first_query + rows, device=birth.device).unsqueeze(-1)
    visible = (birth <= every) & (every < death)
    if anchors is not None:
        alone = isolated_rows(anchors, first_query, rows).unsqueeze(-1)
        visible &= ~(alone & (anchors >= 0) & (anchors < every))
    return visible
