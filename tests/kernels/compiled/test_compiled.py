"""Kernels as probes launch them, compiled without a GPU: no spills, no torn sums, and they fit."""

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from itertools import count
from pathlib import Path
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from kvsearch_kernels import ahead
from kvsearch_kernels.choose_slots import Ask, choose_slots
from kvsearch_kernels.evict_in_place import Evictions, evict_in_place
from kvsearch_kernels.evict_in_place import triton_impl as evict
from kvsearch_kernels.lifetime_attention import triton_impl as attend
from kvsearch_kernels.packed_attention import Part
from kvsearch_kernels.quantize_kv import Format, quantize
from kvsearch_kernels.repack_kv import NewPool, repack_kv

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
SHARED = {80: 99 * 1024, 90: 227 * 1024}  # bytes of a program; the first also of sm_86 and sm_89
BF16 = torch.bfloat16


class _Utils:
    """Loads nothing, and says how much shared memory there is; Triton refuses what needs more."""

    def __init__(self, arch):
        self.arch = arch

    def load_binary(self, name, binary, shared, device):
        return None, None, 0, 0, 1024

    def unload_module(self, module):
        """There is nothing to unload."""

    def get_device_properties(self, device):
        return {"max_shared_mem": SHARED[self.arch], "multiprocessor_count": 132}


class _Driver:
    """What Triton asks of a driver; a launch does nothing."""

    devices = count(100)  # Triton keeps kernels by device: none is of another architecture

    def __init__(self, arch):
        self.arch, self.device, self.utils = arch, next(self.devices), _Utils(arch)

    def launcher_cls(self, src, metadata):
        return lambda *args: None

    def get_current_target(self):
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self):
        return self.device

    def get_current_stream(self, device):
        return 0

    def get_active_torch_device(self):
        return torch.device("cpu")


@contextmanager
def compiling(arch: int) -> Iterator[list[dict[str, str]]]:
    """Inside, `op.again("triton", ...)` compiles for `sm_<arch>`; gives files of each kernel."""
    made = []

    def listen(*, metadata_group, **rest):
        made.append({Path(name).suffix: path for name, path in metadata_group.items()})

    with (
        mock.patch.object(driver, "_active", _Driver(arch)),
        mock.patch.object(triton.knobs.compilation, "listener", listen),
        mock.patch.object(attend, "ampere", lambda device: arch < 90),
        mock.patch.object(evict, "ampere", lambda device: arch < 90),
    ):
        yield made


def check(made: list[dict[str, str]]) -> None:
    """Assert that something was compiled, without spills and torn sums."""
    assert made
    for files in made:
        usage = subprocess.run(
            [str(TOOLS / "cuobjdump"), "-res-usage", files[".cubin"]],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
        assert found and int(found[2]) == 0, f"{files['.cubin']} spills: {usage}"
        assert not (torn := torn_sums(Path(files[".ttgir"]).read_text())), torn


def torn_sums(ttgir: str) -> list[str]:
    """Layouts of sums that were wrong on an H200, with Triton 3.6.

    In these the warps that share an axis are not neighbours: those of another are in between.
    """
    warps = {
        name: json.loads(bases)
        for name, bases in re.findall(
            r"^(#\w+) = #ttg\.linear<\{.*?warp = (\[.*?\]), bl", ttgir, re.M
        )
    }
    torn = []
    for name in re.findall(
        r'"tt\.reduce"\([^)]*\) <\{axis[^:]*:.*?\}\) : \(.*?(#\w+)>', ttgir, re.S
    ):
        axes = [next((i for i, x in enumerate(basis) if x), -1) for basis in warps.get(name, [])]
        runs = [axis for i, axis in enumerate(axes) if i == 0 or axes[i - 1] != axis]
        if len(runs) != len({*runs}):
            torn.append(f"{name}: {warps[name]}")
    return torn


@pytest.mark.parametrize(
    ("warps", "found"), [([[0, 0, 16], [0, 1, 0], [0, 0, 1]], 1), ([[0, 1, 0], [0, 0, 16]], 0)]
)
def test_a_sum_over_warps_that_are_not_neighbours_is_found(warps, found):
    """The first layout is that of the kernel which was wrong on an H200."""
    text = (
        f"#linear = #ttg.linear<{{register = [], lane = [], warp = {warps}, block = []}}>\n"
        '%45 = "tt.reduce"(%44) <{axis = 1 : i32}> ({\n}) : (tensor<16x2x32xi32, #linear>) -> x'
    )
    assert len(torn_sums(text)) == found


OPS = ahead.ops()
WIDTHS = (8, 5, 4, 3, 2, 1)
# of an op's probe, compiled here; of the others the last
CASES = {"decode_step": (6, 7, 13, 18), "repack_kv": (6,)}
QUICK = ("lifetime_attention", "quantize_kv", "choose_slots")


@pytest.mark.parametrize(
    ("name", "arch"),
    [pytest.param(name, arch, marks=[pytest.mark.slow] * (arch == 80 or name not in QUICK))
     for name in OPS for arch in (80, 90)],
)  # fmt: skip
def test_each_op_compiles(name, arch):
    every = list(import_module(OPS[name].probe).cases(torch.device("cpu"), torch.float16))
    with compiling(arch) as made:
        for case in CASES.get(name, (-1,)):
            args, kwargs = every[case]
            OPS[name].again("triton", *args, **kwargs)
    check(made)


def lloyd(bits, block=None):
    return Format(bits, 64, "lloyd", rotate=True, block=block)


def evicts(dtype, D, slots):
    """One interval of `evict_in_place`."""
    c, n = 64, slots - 64
    args = (
        torch.zeros(2, 1, 1, slots, D, dtype=dtype), torch.zeros(1, 1, slots),
        torch.arange(slots)[None, None], torch.zeros(1, 1, c, D, dtype=dtype),
        *(torch.zeros(1, 2, 1, 1, c, D, dtype=dtype) for _ in "nk"), torch.ones(c),
    )  # fmt: skip
    how = Evictions(n, 0, slots, divisors=torch.ones(slots + 1), softcap=2.0)
    return evict_in_place, (*args, how), {}


def repacks(D):
    """A pool of each of 13 formats, from those of another."""
    formats = [None, *map(lloyd, WIDTHS), *(lloyd(b, block=32) for b in WIDTHS)]
    x = torch.randn(1, 1, 16, D, dtype=BF16)
    held = {fmt: x if fmt is None else quantize(x.float(), fmt) for fmt in formats}
    pools = [
        NewPool(torch.arange(4), [Part(held[old], held[old], old, old)], None, (new, new))
        for old, new in zip(formats, formats[1:] + formats[:1], strict=True)
    ]
    return repack_kv, (pools,), {"dtype": BF16, "native": BF16}


def chooses(slots):
    return choose_slots, ([Ask(torch.rand(1, 1, slots), torch.zeros(slots).byte(), 16)],), {}


LARGEST = {  # the most that each takes, which no probe has: a launch would fail for lack of room
    **{
        f"evict_in_place/{D}/{kind}": partial(evicts, kind, D, slots)
        for D, kind, slots in ((128, BF16, 4096), (256, BF16, 4096), (128, torch.float32, 2048))
    },
    "repack_kv": partial(repacks, 64),  # with more channels it takes minutes
    "choose_slots": partial(chooses, 4096),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arch"),
    # the others are launched alike everywhere: what fits into the smaller memory fits
    [(name, arch) for name in LARGEST for arch in SHARED if arch == 80 or "evict" in name],
)
def test_the_largest_kernels_compile(name, arch):
    op, args, kwargs = LARGEST[name]()
    with compiling(arch) as made:
        op.again("triton", *args, **kwargs)
    check(made)
