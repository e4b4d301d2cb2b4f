"""Make one pool of a cache from slots of all pools: what was in it moves, the rest is encoded."""

from kvsearch_kernels.op import Op
from kvsearch_kernels.repack_kv.reference import reference

repack_kv = Op(
    "repack_kv",
    reference,
    {"triton": "kvsearch_kernels.repack_kv.triton_impl"},
    "kvsearch_kernels.repack_kv.probe",
)

__all__ = ["repack_kv"]
