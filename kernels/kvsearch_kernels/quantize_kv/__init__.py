"""Quantise and pack the heads of tokens, and read them back."""

from kvsearch_kernels.op import Op
from kvsearch_kernels.quantize_kv.fake import fake_quantize
from kvsearch_kernels.quantize_kv.reference import (
    Format,
    Packed,
    dequantize,
    dequantize_slots,
    quantize,
)

quantize_kv = Op(
    "quantize_kv",
    quantize,
    {
        "triton": "kvsearch_kernels.quantize_kv.triton_impl",
        "numba": "kvsearch_kernels.quantize_kv.numba_impl",  # CPU
    },
    "kvsearch_kernels.quantize_kv.probe",
)
dequantize_kv = Op(
    "dequantize_kv",
    dequantize_slots,
    {
        "triton": "kvsearch_kernels.quantize_kv.triton_inverse",
        "numba": "kvsearch_kernels.quantize_kv.numba_inverse",  # CPU
    },
    "kvsearch_kernels.quantize_kv.probe_inverse",
)

__all__ = [
    "Format",
    "Packed",
    "dequantize",
    "dequantize_kv",
    "fake_quantize",
    "quantize",
    "quantize_kv",
]
