"""Who stays at a compaction, and the tier of everyone who does, from the ranks of slots."""

from kvsearch_kernels.choose_slots.reference import Ask, best_between, reference, rising_bits
from kvsearch_kernels.op import Op

choose_slots = Op(
    "choose_slots",
    reference,
    {
        "triton": "kvsearch_kernels.choose_slots.triton_impl",
        "numba": "kvsearch_kernels.choose_slots.numba_impl",  # CPU
    },
    "kvsearch_kernels.choose_slots.probe",
)

__all__ = ["Ask", "best_between", "choose_slots", "rising_bits"]
