"""Registers of a warp, and how an operand is read and written as a type."""

import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from machine.program import Program

LANES = 32
Array = np.ndarray[Any, Any]
Read = Callable[["Warp"], Array]
Write = Callable[["Warp", "Array | None", Any], None]

DTYPES = {
    "pred": np.bool_, "f16": np.float16, "f32": np.float32, "f64": np.float64,
    **{f"{x}{n}": np.dtype(f"{'i' if x == 's' else 'u'}{n // 8}").type
       for x in "sub" for n in (8, 16, 32, 64)},
    "bf16": np.uint16, "f16x2": np.uint32, "bf16x2": np.uint32,
}  # fmt: skip
BANKS = {"p": np.bool_, "h": np.uint16, "w": np.uint32, "d": np.uint64}


class Warp:
    """Registers of 32 lanes, rows of banks, and where the warp is.

    Attributes:
        number: of the warp among all of a launch.
        epoch: barriers that it has passed.
        copies, products: groups of copies to shared memory and of `wgmma` that are under way, the
            last one open.
    """

    def __init__(self, program: Program, warp: int, place: tuple[int, ...], grid: tuple[int, ...],
                 parameters: dict[str, Any], index: int) -> None:  # fmt: skip
        self.number, self.epoch = index * program.warps + warp, 0
        self.parameters = parameters
        self.copies: list[list[Any]] = [[]]
        self.products: list[list[Callable[[], None]]] = [[]]
        self.at: Array = np.zeros(LANES, np.int64)
        self.views: dict[tuple[str, type], Array] = {}
        for bank, dtype in BANKS.items():
            held = np.empty((program.counts[bank], LANES), dtype)
            held.view(np.uint8)[...] = 1 if bank == "p" else 0xA5  # nobody may rely on it
            self.views[bank, dtype] = held
        lanes = np.arange(LANES, dtype=np.uint32)
        self.special = {"%tid.x": lanes + np.uint32(warp * LANES), "%laneid": lanes}
        for name, numbers in (("ctaid", place), ("nctaid", grid)):
            for axis, n in zip("xyz", numbers, strict=True):
                self.special[f"%{name}.{axis}"] = np.full(LANES, n, np.uint32)

    def row(self, bank: str, i: int, dtype: type) -> Array:
        """Row `i` of a bank, seen as `dtype` of the bank's width."""
        held = self.views.get((bank, dtype))
        if held is None:
            held = self.views[bank, dtype] = self.views[bank, BANKS[bank]].view(dtype)
        found: Array = held[i]
        return found


def number(text: str, dtype: type) -> Any:
    """An immediate operand."""
    if text.startswith("0f"):
        found = struct.unpack(">f", bytes.fromhex(text[2:]))[0]
    elif text.startswith("0d"):
        found = struct.unpack(">d", bytes.fromhex(text[2:]))[0]
    else:
        found = int(text.rstrip("U"), 0)
        if np.issubdtype(dtype, np.integer):
            size = 8 * np.dtype(dtype).itemsize
            found %= 1 << size
            if np.issubdtype(dtype, np.signedinteger) and found >> (size - 1):
                found -= 1 << size
        elif dtype is np.float32 and text.startswith("0x"):
            found = np.uint32(found).view(np.float32)
        return np.array([found]).astype(dtype)
    # bits of a float where a register is only moved
    wide = np.array([found], np.float32 if text.startswith("0f") else np.float64)
    return wide if np.issubdtype(dtype, np.floating) else wide.view(dtype)


def reader(program: Program, operand: str, kind: str) -> Read:
    """How to read an operand as a type."""
    dtype = DTYPES[kind]
    if operand == "global_smem":
        start = np.zeros(1, dtype)
        return lambda warp: start
    if operand[0] == "%" and operand not in program.registers:
        return lambda warp: warp.special[operand].astype(dtype)
    if operand not in program.registers:
        fixed = number(operand, dtype)
        return lambda warp: fixed
    bank, i = program.registers[operand]
    if np.dtype(BANKS[bank]).itemsize == np.dtype(dtype).itemsize:
        return lambda warp: warp.row(bank, i, dtype)
    whole = BANKS[bank]  # a part of a register
    return lambda warp: warp.row(bank, i, whole).astype(f"u{np.dtype(dtype).itemsize}").view(dtype)


def writer(program: Program, operand: str, kind: str) -> Write:
    """How to write a type to a register, in the lanes of a mask."""
    if operand == "_":
        return lambda warp, mask, value: None
    dtype = DTYPES[kind]
    bank, i = program.registers[operand]
    if np.dtype(BANKS[bank]).itemsize != np.dtype(dtype).itemsize:  # the rest is 0, or the sign
        dtype = np.dtype(f"{'i' if kind[0] == 's' else 'u'}{np.dtype(BANKS[bank]).itemsize}").type

    def write(warp: Warp, mask: "Array | None", value: Any) -> None:
        row = warp.row(bank, i, dtype)
        if mask is None:
            row[...] = value
        else:
            np.copyto(row, value, where=mask, casting="unsafe")

    return write
