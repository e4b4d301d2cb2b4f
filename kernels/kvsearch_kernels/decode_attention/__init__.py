"""Attention of one query token over a cache held in several storage formats."""

from kvsearch_kernels.decode_attention.reference import Part, reference
from kvsearch_kernels.op import Op

decode_attention = Op(
    "decode_attention",
    reference,
    {
        "triton": "kvsearch_kernels.decode_attention.triton_impl",
        "numba": "kvsearch_kernels.decode_attention.numba_impl",  # CPU
    },
    "kvsearch_kernels.decode_attention.probe",
)

__all__ = ["Part", "decode_attention"]
