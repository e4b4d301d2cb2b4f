"""Proposing policies, evaluating them, and keeping what was measured.

The package can be called: `kvsearch.search(model, text)` is `kvsearch.app.search.search`.
"""
