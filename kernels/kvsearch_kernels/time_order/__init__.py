"""Where slots in order of time lie when pools follow one another."""

from kvsearch_kernels.op import Op
from kvsearch_kernels.time_order.reference import reference

time_order = Op(
    "time_order",
    reference,
    {"numba": "kvsearch_kernels.time_order.numba_impl"},  # CPU
    "kvsearch_kernels.time_order.probe",
)

__all__ = ["time_order"]
