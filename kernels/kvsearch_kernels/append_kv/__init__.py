"""Write new tokens behind those that pools of fixed capacity hold."""

from kvsearch_kernels.append_kv.reference import reference
from kvsearch_kernels.op import Op

append_kv = Op(
    "append_kv",
    reference,
    {
        "triton": "kvsearch_kernels.append_kv.triton_impl",
        "slices": "kvsearch_kernels.append_kv.slices_impl",  # CPU
    },
    "kvsearch_kernels.append_kv.probe",
)

__all__ = ["append_kv"]
