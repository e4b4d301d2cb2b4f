"""Who stays at a compaction, in which tier and place, and with what sums, from ranks of slots."""

from kvsearch_kernels.choose_slots.reference import best_between, reference, rising_bits
from kvsearch_kernels.choose_slots.request import Ask, Choice, Sums
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

__all__ = ["Ask", "Choice", "Sums", "best_between", "choose_slots", "rising_bits"]
