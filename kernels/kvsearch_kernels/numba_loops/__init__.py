"""Loops of the CPU implementations, compiled by numba at their first use and kept on disk.

Tensors come as addresses and strides in rows of integers (`numba_args`, `rows`): so the number of
parts, their formats and their types are data, and nothing is compiled for them. Importing one of
these files imports numba.
"""
