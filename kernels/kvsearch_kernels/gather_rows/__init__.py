"""Copy rows of many tensors at once, as bytes: what is held of slots that change their place."""

from kvsearch_kernels.gather_rows.reference import Rows, reference
from kvsearch_kernels.op import Op

gather_rows = Op(
    "gather_rows",
    reference,
    {
        "triton": "kvsearch_kernels.gather_rows.triton_impl",
        "numba": "kvsearch_kernels.gather_rows.numba_impl",  # CPU
    },
    "kvsearch_kernels.gather_rows.probe",
)

__all__ = ["Rows", "gather_rows"]
