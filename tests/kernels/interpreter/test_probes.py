"""The interpreted kernels pass the probes that they will have to pass on a GPU."""

import pytest
import torch
from kernel_tools import poisoned
from test_references import TRITON

from kvsearch_kernels.decode_attention import decode_attention, probe
from kvsearch_kernels.trust import prove

CPU, F16, F32 = torch.device("cpu"), torch.float16, torch.float32

LONG = ("decode_step",)  # the others have its lines
PROBED = [pytest.param(op, marks=[pytest.mark.slow] * (op.name in LONG)) for op in TRITON]


@pytest.mark.parametrize("op", PROBED, ids=lambda op: op.name)
def test_interpreted_kernels_pass(op):
    with poisoned():
        assert prove(op, "triton", CPU, F16) is None


# ops that score take fp32 through the same lines as these
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("lifetime_attention", F32), ("quantize_kv", F32), ("dequantize_kv", torch.uint8)],
)  # fmt: skip
def test_so_do_they_in_other_types(name, dtype):
    (op,) = (op for op in TRITON if op.name == name)
    assert prove(op, "triton", CPU, dtype) is None


@pytest.mark.slow
def test_so_does_decoding_by_fp32_queries():
    """Over four formats; which one it is makes no difference to the queries."""
    for args, kwargs in probe.cases(CPU, F32, probe.MIXED[1:2]):
        got = decode_attention.run("triton", *args, **kwargs)
        assert probe.differs(got, *args, **kwargs) is None
