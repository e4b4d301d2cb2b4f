"""Codebooks: what a group of numbers is rounded to. A new one is a file and a line here."""

from kvsearch_kernels.codebooks.base import Codebook
from kvsearch_kernels.codebooks.fp8 import Fp8
from kvsearch_kernels.codebooks.ggml import GgmlMinimum, GgmlSymmetric
from kvsearch_kernels.codebooks.lloyd import Lloyd
from kvsearch_kernels.codebooks.nvfp4 import Nvfp4
from kvsearch_kernels.codebooks.turboquant import TurboQuantKey, TurboQuantValue
from kvsearch_kernels.codebooks.uniform import Uniform
from kvsearch_kernels.codebooks.vllm import VllmFp8, VllmInt

CODEBOOKS: dict[str, Codebook] = {
    "uniform": Uniform(),
    "lloyd": Lloyd(),
    "e4m3": Fp8("e4m3fn", "fp8 e4m3"),
    "e5m2": Fp8("e5m2", "fp8 e5m2"),
    "ggml-0": GgmlSymmetric(),
    "ggml-1": GgmlMinimum(),
    "vllm-int": VllmInt(),
    "vllm-fp8": VllmFp8(),
    "turboquant-k": TurboQuantKey(),
    "turboquant-v": TurboQuantValue(),
    "nvfp4": Nvfp4(),
}

__all__ = ["CODEBOOKS", "Codebook"]
