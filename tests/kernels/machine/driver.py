"""A driver for Triton whose device is the machine."""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import count
from typing import Any
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver

from kvsearch_kernels.evict_in_place import triton_impl as evict
from kvsearch_kernels.lifetime_attention import triton_impl as attend
from machine.launch import Kernel
from machine.program import parse

DEVICES = count(100)  # Triton keeps kernels by device: none is of another machine or a real one
LAUNCHES: list[str] = []  # names of the kernels that ran


@cache
def _kernel(text: str, shared: int) -> Kernel:
    return Kernel(parse(text), shared)


class _Launcher:
    def __init__(self, src: Any, metadata: Any) -> None:
        self.kinds = list(src.signature.values())

    def __call__(self, x: int, y: int, z: int, stream: int, function: Any, *rest: Any) -> None:
        values = [
            value for kind, value in zip(self.kinds, rest[4:], strict=True) if kind != "constexpr"
        ]
        LAUNCHES.append(function.program.name)
        function.launch((x, y, z), [*values, 0, 0])  # two kinds of scratch memory, which none uses


class _Utils:
    def __init__(self, edit: Callable[[str], str]) -> None:
        self.edit = edit

    def load_binary(self, name: str, ptx: bytes, shared: int, device: int) -> tuple[Any, ...]:
        return None, _kernel(self.edit(ptx.decode()), shared), 0, 0, 1024

    def unload_module(self, module: Any) -> None:
        """There is nothing to unload."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 * 1024, "multiprocessor_count": 132}


class Driver:
    """What Triton asks of a driver."""

    launcher_cls = _Launcher

    def __init__(self, arch: int, edit: Callable[[str], str]) -> None:
        self.arch, self.device, self.utils = arch, next(DEVICES), _Utils(edit)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Where Triton keeps what it has compiled, which is no machine code here."""
    return tempfile.TemporaryDirectory()


@contextmanager
def machine(arch: int = 90, edit: Callable[[str], str] = str) -> Iterator[None]:
    """Inside, Triton compiles for `sm_<arch>`, and its launches run on the machine.

    `op.again("triton", ...)` launches; `op.run` would say that tensors are not on a GPU. `edit` is
    given the text of each kernel, and gives what runs.
    """
    with (
        mock.patch.dict(os.environ, {"TRITON_CACHE_DIR": _folder().name}),
        mock.patch.object(CUDABackend, "make_cubin", lambda self, ptx, *rest: ptx.encode()),
        mock.patch.object(driver, "_active", Driver(arch, edit)),
        mock.patch.object(attend, "ampere", lambda device: arch < 90),
        mock.patch.object(evict, "ampere", lambda device: arch < 90),
    ):
        yield
