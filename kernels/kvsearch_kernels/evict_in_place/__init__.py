"""Evict by score in a full cache, interval after interval, in place."""

from kvsearch_kernels.evict_in_place.reference import Evictions, reference
from kvsearch_kernels.op import Op

evict_in_place = Op(
    "evict_in_place",
    reference,
    {
        "triton": "kvsearch_kernels.evict_in_place.triton_impl",
        "numba": "kvsearch_kernels.evict_in_place.numba_impl",  # CPU, intervals of one token
    },
    "kvsearch_kernels.evict_in_place.probe",
)

__all__ = ["Evictions", "evict_in_place"]
