"""Add what slots received from one token to what they received before."""

from kvsearch_kernels.op import Op
from kvsearch_kernels.tally.reference import reference

tally = Op(
    "tally",
    reference,
    {"triton": "kvsearch_kernels.tally.triton_impl"},
    "kvsearch_kernels.tally.probe",
)

__all__ = ["tally"]
