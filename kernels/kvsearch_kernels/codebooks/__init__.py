"""Codebooks: what a group of numbers is rounded to. A new one is a file and a line here."""

from kvsearch_kernels.codebooks.base import Codebook
from kvsearch_kernels.codebooks.fp8 import Fp8
from kvsearch_kernels.codebooks.ggml import GgmlMinimum, GgmlSymmetric
from kvsearch_kernels.codebooks.lloyd import Lloyd
from kvsearch_kernels.codebooks.uniform import Uniform

CODEBOOKS: dict[str, Codebook] = {
    "uniform": Uniform(),
    "lloyd": Lloyd(),
    "e4m3": Fp8("e4m3fn", "fp8 e4m3"),
    "e5m2": Fp8("e5m2", "fp8 e5m2"),
    "ggml-0": GgmlSymmetric(),
    "ggml-1": GgmlMinimum(),
}

__all__ = ["CODEBOOKS", "Codebook"]
