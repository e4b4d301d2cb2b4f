"""Checks of every Triton implementation before it launches; imports no Triton itself."""

import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LOG2E = 1.4426950408889634
INT32_MAX = 2**31 - 1
# Option of every launch. Triton 3.9 warns where it is not given, since 3.10 will not fuse products
# with sums, and kernels would take more instructions.
FUSED = {"enable_fp_fusion": True}


def emulated() -> bool:
    """Whether Triton runs kernels in its interpreter, which `auto` must never choose."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in {"1", "true", "on", "yes", "y"}


def checking() -> bool:
    """Whether indices are checked on the host before a launch (`KVSEARCH_CHECK=1`)."""
    return os.environ.get("KVSEARCH_CHECK") == "1"


def lacks_memory(error: BaseException) -> bool:
    """Whether an error says that a device has too little memory.

    It is torch's own, or has the words of CUDA and Triton, of a CPU, or of cuBLAS.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    said = ("out of memory", "can't allocate memory", "ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(x in str(error) for x in said)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def why_not_here(*tensors: Tensor) -> str | None:
    """Reason why Triton cannot run on these tensors, by device, dtype or need of gradients."""
    for x in tensors:
        if not x.is_cuda and not emulated():
            return f"tensors must be on a CUDA device, one is on {x.device}"
        if x.device != tensors[0].device:
            return f"tensors are on different devices, {tensors[0].device} and {x.device}"
        if x.requires_grad and torch.is_grad_enabled():
            return "there is no backward pass and a tensor requires a gradient"
        if x.is_floating_point() and x.dtype is torch.bfloat16 and emulated():
            return "the Triton interpreter computes torch.bfloat16 wrongly"
    if not emulated() and (reason := why_not_gpu(tensors[0].device)):
        return reason
    if not _has_triton():
        return "triton is not installed"
    return None


def why_not_gpu(device: torch.device) -> str | None:
    """Reason why no kernel is for a device that torch calls CUDA."""
    if torch.version.hip is not None:
        return "kernels are for NVIDIA GPUs; torch is built for ROCm"
    # Triton's own bound; compiled for sm_75, attention had no tensor cores, and hundreds of spills
    if device.type == "cuda" and _capability(device) < (8, 0):
        return "kernels are for GPUs of compute capability 8.0 and more"
    return None


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def why_not_heads(q: Tensor, *others: Tensor) -> str | None:
    """Reason why queries `[B, Hq, M, D]` and keys or values `[B, H, E, D]` do not fit a kernel."""
    if q.dtype not in DTYPES:
        return f"dtype must be float16, bfloat16 or float32, got {q.dtype}"
    for x in (q, *others):
        if x.dim() != 4:
            return f"tensors must have 4 axes, one has shape {tuple(x.shape)}"
        if x.dtype is not q.dtype:
            return f"tensors must share one dtype, got {q.dtype} and {x.dtype}"
        if x.shape[-1] not in HEAD_DIMS:
            return f"head_dim must be 64, 128 or 256, got {x.shape[-1]}"
        if x.shape[1] == 0 or q.shape[1] % x.shape[1]:
            return f"KV heads must divide query heads, got {x.shape[1]} and {q.shape[1]}"
        if x.shape[0] != q.shape[0]:
            return f"batch sizes differ, {q.shape[0]} and {x.shape[0]}"
    if others and q.shape[-1] != others[0].shape[-1]:
        return f"queries and keys differ in head_dim, {q.shape[-1]} and {others[0].shape[-1]}"
    if q.shape[0] * q.shape[1] > 65535:
        return f"batch x query heads must be at most 65535, got {q.shape[0] * q.shape[1]}"
    return None


def on(device: torch.device) -> AbstractContextManager[object]:
    """Makes `device` the current one: Triton launches there, wherever its arguments are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@cache
def ampere(device: torch.device) -> bool:
    """Whether tiles for GPUs before sm_90 are needed."""
    return device.type == "cuda" and _capability(device) < (9, 0)


@cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU; elsewhere those of an H100 or H200, which budgets and counts are for."""
    if device.type != "cuda":
        return 132
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def rows_last(x: Tensor) -> Tensor:
    """`x`, copied only if its last axis is not contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def int32(x: Tensor) -> Tensor:
    """Token indices as int32; "never" saturates at a value that no row reaches."""
    if x.dtype is not torch.int32:
        x = x.clamp(-INT32_MAX, INT32_MAX).to(torch.int32)
    return x.contiguous()


def check_slots(slots: Tensor, n: int) -> None:
    """Under `KVSEARCH_CHECK=1`, raise IndexError when an index is not in `[0, n)`."""
    if checking() and slots.numel():
        low, high = int(slots.min()), int(slots.max())
        if low < 0 or high >= n:
            bad = low if low < 0 else high
            raise IndexError(f"slot {bad} is out of range, there are {n}")


def ceil_div(a: int, b: int) -> int:
    """`a / b`, rounded up."""
    return -(-a // b)


def why_not_slots(x: Tensor, slots: Tensor) -> str | None:
    """Reason why `slots` cannot pick tokens of `x` `[B, H, N, D]`, or None."""
    if slots.dtype not in (torch.int32, torch.int64):
        return f"slots must be int32 or int64, got {slots.dtype}"
    if per_head(x, slots):
        return None
    heads = tuple(x.shape[:2])
    return f"slots must have shape [n] or [{heads[0]}, {heads[1]}, n], got {tuple(slots.shape)}"


def per_head(x: Tensor, data: Tensor) -> bool:
    """Whether `data` of slots is `[n]`, or `[B or 1, H or 1, n]` for `x` `[B, H, N, D]`."""
    heads = zip(data.shape[:2], x.shape[:2], strict=True)
    return data.dim() == 1 or (data.dim() == 3 and all(a in (1, b) for a, b in heads))
