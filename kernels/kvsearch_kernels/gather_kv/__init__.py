"""Copy the kept slots together, moving keys to new positions on the way."""

from kvsearch_kernels.gather_kv.reference import reference
from kvsearch_kernels.op import Op

gather_kv = Op(
    "gather_kv",
    reference,
    {
        "triton": "kvsearch_kernels.gather_kv.triton_impl",
        "numba": "kvsearch_kernels.gather_kv.numba_impl",  # CPU
    },
    "kvsearch_kernels.gather_kv.probe",
)

__all__ = ["gather_kv"]
