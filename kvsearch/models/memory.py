"""Free memory of a device, and the refusal of a model that it cannot hold."""

import os
import re
from pathlib import Path

import torch

from kvsearch.errors import ModelError
from kvsearch.models.read import brief

GROUP, GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")  # of Linux
ELSEWHERE = "choose another GPU with CUDA_VISIBLE_DEVICES, or give --device cpu"


def require_memory(count: int, dtype: torch.dtype, device: torch.device, name: str) -> None:
    """Refuse a model of `count` parameters that the free memory of `device` cannot hold.

    Raises:
        ModelError: it does not fit; the sentence has both sizes.
    """
    need = count * dtype.itemsize
    free = free_memory(device)
    if free is not None and need > free:
        hint = "" if dtype.itemsize < 4 else ", or half of it with --dtype bfloat16"
        raise ModelError(
            f"{name} needs {need / 1e9:.1f} GB of memory as {str(dtype)[6:]} and {device} has "
            f"{free / 1e9:.1f} GB free; choose a smaller model{hint}"
        )


def free_memory(device: torch.device) -> int | None:
    """Bytes that can still be allocated on a device; None where the system does not say.

    Raises:
        ModelError: a GPU that cannot be used: its driver is too old, or others have taken it.
    """
    if device.type == "cuda":
        try:
            return int(torch.cuda.mem_get_info(device)[0])
        except (RuntimeError, AssertionError) as error:
            why = brief(error).rstrip(".")
            raise ModelError(f"{device} cannot be used: {why}; {ELSEWHERE}") from error
    if device.type != "cpu":
        return None
    bounds = [b for b in (_system_memory(), _container_memory()) if b is not None]
    return min(bounds, default=None)


def _system_memory() -> int | None:
    try:  # Linux: counts what the page cache would give back, which AVPHYS does not
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        if found:
            return int(found[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _container_memory() -> int | None:
    """What Linux control groups (a container, a batch job) still allow: this one or one above."""
    try:
        group = re.search(r"^0::/(.*)$", GROUP.read_text(), re.M)
    except OSError:
        return None
    folder = GROUPS / (group[1] if group else "")
    above = (folder, *folder.parents)
    bounds = [_allowed(f) for f in above if f == GROUPS or GROUPS in f.parents]
    return min((b for b in bounds if b is not None), default=None)


def _allowed(folder: Path) -> int | None:
    try:
        limit = int((folder / "memory.max").read_text())  # "max" means none: ValueError
        used = int((folder / "memory.current").read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return limit - used + int(stat["inactive_file"]) + int(stat["active_file"])
    except (OSError, ValueError, KeyError):
        return None
