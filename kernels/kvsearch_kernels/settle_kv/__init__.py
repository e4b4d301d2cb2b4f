"""Keys and values that a compaction leaves, dense, as a cache in packed tiers would read back."""

from kvsearch_kernels.op import Op
from kvsearch_kernels.settle_kv.reference import reference

settle_kv = Op(
    "settle_kv",
    reference,
    {"triton": "kvsearch_kernels.settle_kv.triton_impl"},
    "kvsearch_kernels.settle_kv.probe",
)

__all__ = ["settle_kv"]
