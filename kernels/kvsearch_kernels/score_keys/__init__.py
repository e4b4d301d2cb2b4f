"""How much attention each key received, without an attention map."""

from kvsearch_kernels.op import Op
from kvsearch_kernels.score_keys.reference import reference

score_keys = Op(
    "score_keys",
    reference,
    {"triton": "kvsearch_kernels.score_keys.triton_impl"},
    "kvsearch_kernels.score_keys.probe",
)

__all__ = ["score_keys"]
