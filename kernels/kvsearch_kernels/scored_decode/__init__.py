"""Decoding that also says how much attention each slot received from the query token."""

from kvsearch_kernels.op import Op
from kvsearch_kernels.scored_decode.reference import reference

scored_decode = Op(
    "scored_decode",
    reference,
    {
        "triton": "kvsearch_kernels.scored_decode.triton_impl",
        "numba": "kvsearch_kernels.scored_decode.numba_impl",  # CPU
    },
    "kvsearch_kernels.scored_decode.probe",
)

__all__ = ["scored_decode"]
