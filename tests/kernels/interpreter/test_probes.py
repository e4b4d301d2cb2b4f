"""The interpreted kernels pass the probes that they will have to pass on a GPU."""

from importlib import import_module

import pytest
import torch
from kernel_tools import poisoned
from test_references import TRITON

CPU, F16, F32 = torch.device("cpu"), torch.float16, torch.float32
# Of probes whose other cases take the same lines to other numbers, which cases are run. Every head
# size and format is, next to sinks; with and without votes of each power, turned keys, a softcap,
# forgotten sums.
SOME = {
    "decode_step": (*range(9), 10, 14, 15, 18),
    "choose_slots": (1, 7),
    "evict_in_place": (0, 2, 4, 7),
}


def passes(name, dtype, chosen=None):
    """Run cases of the op's probe, or all."""
    (op,) = (op for op in TRITON if op.name == name)
    probe = import_module(op.probe)
    every = list(probe.cases(CPU, dtype))
    for number in range(len(every)) if chosen is None else chosen:
        args, kwargs = every[number]
        reason = probe.differs(op.run("triton", *args, **kwargs), *args, **kwargs)
        assert reason is None, f"case {number}: {reason}"


@pytest.mark.parametrize("name", [op.name for op in TRITON])
def test_interpreted_kernels_pass(name):
    with poisoned():
        passes(name, F16, SOME.get(name))


# ops that score take fp32 through the same lines as these, whose own tests have it
@pytest.mark.parametrize(
    ("name", "dtype", "case"),
    [("dequantize_kv", torch.uint8, None), ("decode_step", F32, (1,))],
)
def test_so_do_they_in_other_types(name, dtype, case):
    passes(name, dtype, case)
