"""Causal attention over a cache that also says how much attention each key received."""

from kvsearch_kernels.op import Op
from kvsearch_kernels.scored_attention.reference import reference

scored_attention = Op(
    "scored_attention",
    reference,
    {"triton": "kvsearch_kernels.scored_attention.triton_impl"},
    "kvsearch_kernels.scored_attention.probe",
)

__all__ = ["scored_attention"]
