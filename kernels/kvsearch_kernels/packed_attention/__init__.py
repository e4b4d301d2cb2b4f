"""Attention of one query token over slots in several storage formats: the inside of `decode_step`.

docs/packed-attention.md says how packed slots are read, and why so.
"""

from kvsearch_kernels.packed_attention.reference import Part

__all__ = ["Part"]
