"""One new token in all heads of a deployed layer: stored, attended from, and counted."""

from collections.abc import Hashable

from torch import Tensor

from kvsearch_kernels.decode_step import triton_impl
from kvsearch_kernels.decode_step.entering import Entering
from kvsearch_kernels.decode_step.reference import Heads, Stores, Sums, reference
from kvsearch_kernels.decode_step.turned import Turned
from kvsearch_kernels.op import Op

decode_step = Op(
    "decode_step",
    reference,
    {
        "triton": "kvsearch_kernels.decode_step.triton_impl",
        "numba": "kvsearch_kernels.decode_step.numba_impl",  # CPU
    },
    "kvsearch_kernels.decode_step.probe",
)


def prepare(impl: str, q: Tensor, k: Tensor, stores: Stores) -> None:
    """Make what `impl` keeps of newly described stores before the call that needs it."""
    if impl == "triton":
        triton_impl.planned(stores, q, k)


def given(impl: str, stores: Stores) -> Hashable:
    """All that launches of `impl` are given of stores that it knows, but for the token itself.

    None if it does not know them, or what it does cannot be repeated without it.
    """
    return triton_impl.given(stores) if impl == "triton" else None


__all__ = ["Entering", "Heads", "Stores", "Sums", "Turned", "decode_step", "given", "prepare"]
