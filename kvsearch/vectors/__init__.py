"""A conformance kit: what a runtime must compute under a policy, on a model of a few kilobytes."""

from kvsearch.vectors.kit import SCHEMA, kit

__all__ = ["SCHEMA", "kit"]
