"""Meaning of `scored_decode`."""

from collections.abc import Sequence

from torch import Tensor

from kvsearch_kernels.decode_attention.reference import Part, attend
from kvsearch_kernels.room import Room, kept


def reference(
    q: Tensor, parts: Sequence[Part], *, scale: float, softcap: float | None = None,
    room: Room | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend as `decode_attention` does, and say what each slot received.

    Args:
        q: queries `[B, Hq, D]`; `H` divides `Hq`.
        parts: what is held, at most four.
        scale: factor on the dot products.
        softcap: Gemma 2's `cap * tanh(x / cap)` on the scaled products.
        room: where results lie, until the next call with the same one; None takes fresh memory.

    Returns:
        Output `[B, Hq, Dv]` and received attention `[B, H, N]` in fp32 (fp64 of fp64): the mean of
        the probabilities over the query heads of each KV head. The N slots are those of all parts,
        one part after the other; slots not in use receive 0.
    """
    out, _, p = attend(q, parts, scale, softcap)
    return kept(room, "out", out), kept(room, "received", p.mean(2))
