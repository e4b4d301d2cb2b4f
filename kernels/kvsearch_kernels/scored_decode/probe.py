"""Probe of `scored_decode`."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvsearch_kernels.budget import HARDWARE, over_budget
from kvsearch_kernels.decode_attention.probe import BLOCKED, MIXED, eager
from kvsearch_kernels.decode_attention.probe import cases as decoded
from kvsearch_kernels.decode_attention.reference import Part
from kvsearch_kernels.probing import Case
from kvsearch_kernels.scored_decode.reference import reference


def cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Those of `decode_attention`, of whose formats some are enough: the reading is the same."""
    return decoded(device, dtype, (MIXED[0], MIXED[1], BLOCKED, MIXED[-1]))


def differs(
    got: tuple[Tensor, Tensor], q: Tensor, parts: Sequence[Part], *, scale: float,
    softcap: float | None = None,
) -> str | None:  # fmt: skip
    """Why output and received attention are wrong, or None."""
    exact = reference(q.double(), parts, scale=scale, softcap=softcap)
    out, _, received = eager(q, parts, scale=scale, softcap=softcap)
    return over_budget("output", got[0], out, exact[0], slack=HARDWARE) or over_budget(
        "received attention", got[1], received, exact[1], slack=HARDWARE
    )
