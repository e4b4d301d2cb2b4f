"""Copy many tensors to where they are to lie, at once: what a compaction made, to its place."""

from kvsearch_kernels.copy_rows.reference import Copy, reference
from kvsearch_kernels.op import Op

copy_rows = Op(
    "copy_rows",
    reference,
    {"triton": "kvsearch_kernels.copy_rows.triton_impl"},
    "kvsearch_kernels.copy_rows.probe",
)

__all__ = ["Copy", "copy_rows"]
