"""Make pools of a cache from slots of all pools: what was in one moves, the rest is encoded."""

from kvsearch_kernels.op import Op
from kvsearch_kernels.repack_kv.reference import Held, NewPool, reference

repack_kv = Op(
    "repack_kv",
    reference,
    {"triton": "kvsearch_kernels.repack_kv.triton_impl"},
    "kvsearch_kernels.repack_kv.probe",
)

__all__ = ["Held", "NewPool", "repack_kv"]
