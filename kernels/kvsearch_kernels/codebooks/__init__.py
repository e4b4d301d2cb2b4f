"""Codebooks: what a group of numbers is rounded to. A new one is a file and a line here."""

from kvsearch_kernels.codebooks.base import Codebook
from kvsearch_kernels.codebooks.lloyd import Lloyd
from kvsearch_kernels.codebooks.uniform import Uniform

CODEBOOKS: dict[str, Codebook] = {"uniform": Uniform(), "lloyd": Lloyd()}

__all__ = ["CODEBOOKS", "Codebook"]
