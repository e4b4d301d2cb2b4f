"""With several GPUs: a launch happens on the device of the tensors, not on the current one."""

import importlib
import math
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_references import TRITON, call

from kvsearch_kernels import launch
from kvsearch_kernels.configs import DECODE, DECODE_WARPS
from kvsearch_kernels.decode_step import table
from kvsearch_kernels.decode_step.reference import Heads, Stores
from kvsearch_kernels.packed_attention import Part, splits, triton_args
from kvsearch_kernels.packed_attention.splits import cost_of
from kvsearch_kernels.quantize_kv import Format
from tests.launches import KERNELS

RUNS = {
    "lifetime_attention": ["attend"],
    "scored_attention": ["attend", "score"], "quantize_kv": ["quantize"],
    "dequantize_kv": ["dequantize"],
    "repack_kv": ["repack"],
    "choose_slots": ["choose"],
    "decode_step": ["enter", "attend_heads", "combine_heads", "count"],
    "evict_in_place": ["evict"],
}  # fmt: skip


def test_the_current_device_is_set_by_index_and_only_for_cuda(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: asked.append(device.index))
    launch.on(torch.device("cuda", 1))
    launch.on(torch.device("cpu"))
    assert asked == [1]


def test_devices_that_no_kernel_is_for_are_called_cuda_too(monkeypatch):
    fake = SimpleNamespace(
        is_cuda=True, device=torch.device("cuda", 0), requires_grad=False, dtype=torch.float16,
        is_floating_point=lambda: True,
    )  # fmt: skip
    monkeypatch.setattr(launch, "_has_triton", lambda: True)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(launch, "_capability", lambda device: (7, 5))
    assert launch.why_not_here(fake) == "kernels are for GPUs of compute capability 8.0 and more"
    monkeypatch.setattr(launch, "_capability", lambda device: (8, 0))
    assert launch.why_not_here(fake) is None
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert launch.why_not_here(fake) == "kernels are for NVIDIA GPUs; torch is built for ROCm"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert launch.why_not_here(torch.ones(1)) is None


@pytest.mark.parametrize("op", TRITON, ids=lambda op: op.name)
def test_every_kernel_is_launched_on_the_device_of_its_tensors_and_fused(op, monkeypatch):
    pytest.importorskip("triton", reason="triton is not installed")
    current, launched = [None], []

    @contextmanager
    def on(device):
        current.append(device)
        yield
        current.pop()

    class Kernel:
        def __init__(self, name):
            self.name = name

        def __getitem__(self, grid):
            return lambda *args, **kwargs: launched.append(
                (self.name, current[-1], kwargs["enable_fp_fusion"])
            )

    for kernel, home in KERNELS.items():
        module = importlib.import_module(f"kvsearch_kernels.{home}.triton_kernels")
        monkeypatch.setattr(module, kernel, Kernel(kernel))
    for home in {*KERNELS.values()}:
        module = importlib.import_module(f"kvsearch_kernels.{home}.triton_impl")
        monkeypatch.setattr(module, "on", on)
    monkeypatch.setattr("kvsearch_kernels.quantize_kv.triton_inverse.on", on)
    args, kwargs = call(op)
    importlib.import_module(op.impls["triton"]).forward(*args, **kwargs)
    assert launched == [(name, torch.device("cpu"), True) for name in RUNS[op.name]]


@pytest.mark.parametrize("many", [10, 132])
def test_programs_of_decoding_go_by_the_gpu(many, monkeypatch):
    """Until November 2026 there were those of an H200 everywhere."""
    monkeypatch.setattr(triton_args, "multiprocessors", lambda device: many)
    pools = [torch.zeros(2, 2, 40000, 64, dtype=torch.float16) for _ in range(4)]
    lengths = torch.ones(2, 2, dtype=torch.int32)
    heads = [Heads([Part(*pools[:2]), Part(*pools[2:], lengths=lengths)])]
    made = table.made(Stores(heads), 2, DECODE[64, 2], torch.device("cpu"))
    waves = 2 * len(made.programs) / (DECODE_WARPS * many)
    assert waves > 0.75 * math.ceil(waves)


@given(
    tiles=st.integers(1, 300), heads=st.integers(1, 1100), bits=st.sampled_from([1, 4, 16]),
    room=st.sampled_from([30, 396, 1584]),
)  # fmt: skip
def test_no_other_number_of_programs_would_end_much_earlier(tiles, heads, bits, room):
    cost = cost_of(tiles * 32, (None,) * 2 if bits == 16 else (Format(bits, 64),) * 2)

    def took(n):
        longest = -(-tiles // n) * cost / tiles + splits.START
        return -(-heads * n // room) * longest + splits.JOIN * n

    (found,) = splits.splits((cost,), (tiles,), (heads,), room)
    assert 1 <= found <= tiles
    assert took(found) <= 1.1 * min(map(took, range(1, tiles + 1)))


def test_heads_with_more_slots_get_more_programs():
    assert splits.splits((4096.0,), (32,), (256,), 396) == (3,)  # two waves, all but full
    few, many = splits.splits((4096.0, 16384.0), (32, 128), (16, 16), 396)
    assert 4 * few <= many <= 5 * few
    assert splits.splits((4096.0, 16384.0), (32, 128), (16, 16), 0) == (1, 1)
