"""Attention in which every key is visible from its birth to its death."""

from kvsearch_kernels.lifetime_attention.reference import reference
from kvsearch_kernels.op import Op

lifetime_attention = Op(
    "lifetime_attention",
    reference,
    {
        "triton": "kvsearch_kernels.lifetime_attention.triton_impl",
        "torch": "kvsearch_kernels.lifetime_attention.torch_impl",  # CPU
    },
    "kvsearch_kernels.lifetime_attention.probe",
)

__all__ = ["lifetime_attention"]
