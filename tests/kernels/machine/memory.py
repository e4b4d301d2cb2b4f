"""Bytes that kernels read and write, and who touched them since the last barrier."""

import ctypes
import gc
from bisect import bisect_right
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from machine.registers import Array, Warp

ANY = np.uint8(0xA7)


class Fault(AssertionError):
    """A kernel did what a GPU would not bear, or not promise."""


class Bytes:
    """A stretch of memory, and for each byte the last warp that wrote and read it, and when.

    Strict memory bears no read and write of two warps without a barrier. In other memory what is
    read so is any number, since warps that hold the same numbers all read them before one of them
    writes: that is right if only the one that writes uses them.
    """

    def __init__(self, held: Array, name: str, start: int = 0, *, strict: bool = False) -> None:
        self.held, self.name, self.start, self.strict = held, name, start, strict
        self.writer = np.full(len(held), -1, np.int32)
        self.written = np.zeros(len(held), np.int32)
        self.reader = np.full(len(held), -1, np.int32)
        self.read = np.zeros(len(held), np.int32)

    def _at(self, addresses: Array, size: int) -> Array:
        """Places `[n, size]` of bytes."""
        at = addresses.astype(np.int64) - self.start
        if (at < 0).any() or (at + size > len(self.held)).any():
            raise Fault(f"byte {at.min()} to {at.max() + size} of {len(self.held)} of {self.name}")
        if (addresses.astype(np.uint64) % np.uint64(size)).any():
            raise Fault(f"{size} bytes at an odd place of {self.name}")
        found: Array = at[:, None] + np.arange(size)
        return found

    def _clash(self, who: Array, when: Array, warp: Warp, warps: int) -> Array:
        """Whether another program, or another warp since the barrier, is among these."""
        others = (who >= 0) & (who != warp.number)
        return others & ((who // warps != warp.number // warps) | (when == warp.epoch))

    def load(self, addresses: Array, size: int, warp: Warp, warps: int) -> Array:
        """Bytes `[n, size]`."""
        at = self._at(addresses, size)
        clash = self._clash(self.writer[at], self.written[at], warp, warps)
        if self.strict and clash.any():
            raise Fault(f"{self.name} is read where another warp has written, without a barrier")
        self.reader[at], self.read[at] = warp.number, warp.epoch
        return np.where(clash, ANY, self.held[at])

    def store(self, addresses: Array, values: Array, warp: Warp, warps: int) -> None:
        """Write bytes `[n, size]`; the same bytes again are no clash."""
        at = self._at(addresses, values.shape[1])
        other = self.held[at] != values
        if (self._clash(self.writer[at], self.written[at], warp, warps) & other).any():
            raise Fault(f"two warps write to {self.name} without a barrier")
        late = self.strict and self._clash(self.reader[at], self.read[at], warp, warps) & other
        if np.any(late):
            raise Fault(f"{self.name} is written where another warp has read, without a barrier")
        self.held[at] = values
        self.writer[at], self.written[at] = warp.number, warp.epoch


class Tensors:
    """Global memory: the storages of tensors, and nothing else."""

    def __init__(self, given: list[torch.Tensor]) -> None:
        self.known: dict[int, Bytes] = {}
        self.starts: list[int] = []
        self.last: Bytes | None = None
        self._learn(given)

    def _learn(self, given: Iterable[torch.Tensor]) -> None:
        for x in given:
            storage = x.untyped_storage()
            start, size = storage.data_ptr(), storage.nbytes()
            if size and start not in self.known:
                held = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(start))
                self.known[start] = Bytes(held, f"a tensor of {size} bytes", start)
        self.starts = sorted(self.known)

    def _region(self, address: int) -> Bytes | None:
        at = bisect_right(self.starts, address) - 1
        region = self.known[self.starts[at]] if at >= 0 else None
        inside = region is not None and address < region.start + len(region.held)
        return region if inside else None

    def _found(self, address: int) -> Bytes:
        """The region of an address; a table in memory may point to tensors that nobody gave."""
        region = self._region(address)
        if region is None:
            every = (x for x in gc.get_objects() if issubclass(type(x), torch.Tensor))
            self._learn([x for x in every if x.device.type == "cpu"])
            region = self._region(address)
        if region is None:
            raise Fault(f"address {address:#x} is in no tensor")
        return region

    def _groups(self, addresses: Array) -> list[tuple[Bytes, Any]]:
        """Regions, and which of the addresses lie in each."""
        low, high = int(addresses.min()), int(addresses.max())
        region = self.last
        if region is None or not region.start <= low <= high < region.start + len(region.held):
            region = self._found(int(addresses[0]))
        self.last = region
        found: list[tuple[Bytes, Any]] = []
        rest = np.ones(len(addresses), np.bool_)
        while True:
            here = (addresses >= region.start) & (addresses < region.start + len(region.held))
            found.append((region, here & rest))
            rest &= ~here
            if not rest.any():
                return found
            region = self._found(int(addresses[rest][0]))

    def load(self, addresses: Array, size: int, warp: Warp, warps: int) -> Array:
        """Bytes `[n, size]`."""
        groups = self._groups(addresses)
        if len(groups) == 1:
            return groups[0][0].load(addresses, size, warp, warps)
        out = np.empty((len(addresses), size), np.uint8)
        for region, here in groups:
            out[here] = region.load(addresses[here], size, warp, warps)
        return out

    def store(self, addresses: Array, values: Array, warp: Warp, warps: int) -> None:
        """Write bytes `[n, size]`."""
        for region, here in self._groups(addresses):
            region.store(addresses[here], values[here], warp, warps)
