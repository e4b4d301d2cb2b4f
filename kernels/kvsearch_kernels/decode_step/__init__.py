"""One new token in all heads of a deployed layer: stored, attended from, and counted."""

from kvsearch_kernels.decode_step.reference import Heads, Stores, Sums, reference
from kvsearch_kernels.op import Op

decode_step = Op(
    "decode_step",
    reference,
    {
        "triton": "kvsearch_kernels.decode_step.triton_impl",
        "numba": "kvsearch_kernels.decode_step.numba_impl",  # CPU
    },
    "kvsearch_kernels.decode_step.probe",
)

__all__ = ["Heads", "Stores", "Sums", "decode_step"]
