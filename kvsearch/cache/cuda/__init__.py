"""Decoded tokens as CUDA graphs."""
