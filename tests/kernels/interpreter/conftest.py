"""Collected only where TRITON_INTERPRET=1, which `test_lanes.py` sets in a process of its own."""

import os

import pytest

from kvsearch_kernels.op import Op

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


@pytest.fixture
def kernels_alone(monkeypatch):
    """Call it, and from then on every op but some runs on its Triton kernel, or says why not."""
    references = set()

    def pick(op, *args, **kwargs):
        if op.name in references:
            return "reference"
        reason = op._why_not("triton", *args, **kwargs)
        assert reason is None, f"{op.name}: {reason}"
        return "triton"

    def start(*but):
        references.update(but)
        monkeypatch.setattr(Op, "pick", pick)

    return start
