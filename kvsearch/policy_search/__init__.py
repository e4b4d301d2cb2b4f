"""Proposing policies, evaluating them, and keeping what was measured."""
