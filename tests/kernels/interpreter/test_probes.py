"""The interpreted kernels pass the probes that they will have to pass on a GPU."""

import pytest
import torch
from kernel_tools import poisoned
from test_references import TRITON

from kvsearch_kernels.trust import prove

F16, F32 = torch.float16, torch.float32


LONG = ("decode_step",)  # the others have its lines
PROBED = [pytest.param(op, marks=[pytest.mark.slow] * (op.name in LONG)) for op in TRITON]


@pytest.mark.parametrize("op", PROBED, ids=lambda op: op.name)
def test_interpreted_kernels_pass(op):
    with poisoned():
        assert prove(op, "triton", torch.device("cpu"), F16) is None


# scored ones take fp32 through the same lines as these
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("lifetime_attention", F32), ("decode_attention", F32), ("quantize_kv", F32),
     ("dequantize_kv", torch.uint8)],
)  # fmt: skip
def test_so_do_they_in_other_types(name, dtype):
    (op,) = (op for op in TRITON if op.name == name)
    assert prove(op, "triton", torch.device("cpu"), dtype) is None
