"""Add a token's queries, without their angle, to the sums that a rule keeps of them."""

from kvsearch_kernels.op import Op
from kvsearch_kernels.sum_queries.reference import reference

sum_queries = Op(
    "sum_queries",
    reference,
    {
        "triton": "kvsearch_kernels.sum_queries.triton_impl",
        "numba": "kvsearch_kernels.sum_queries.numba_impl",
    },
    "kvsearch_kernels.sum_queries.probe",
)

__all__ = ["sum_queries"]
