"""Instructions that move between registers and memory."""

import re
from typing import Any

import numpy as np

from machine.arithmetic import Step
from machine.memory import Bytes, Fault
from machine.program import Address, Line, Program
from machine.registers import DTYPES, LANES, Array, Read, Warp, reader, writer
from machine.together import whole

EVERY = np.ones(LANES, np.bool_)


def build(program: Program, line: Line, memory: Any) -> Step | None:
    """How to carry out a line that loads, stores or copies; None if it does not.

    `memory` has `shared` and `tensors`, both new for each program of a launch or launch.
    """
    parts = line.name.replace("::cta", "").split(".")
    if parts[0] == "ld" and parts[1] == "param":
        return _parameter(program, line)
    if parts[0] in ("ld", "st"):
        return (_load if parts[0] == "ld" else _store)(program, line, parts[1], memory)
    if line.name.startswith("cp.async"):
        return _copy(program, line, memory)
    if parts[0] in ("ldmatrix", "stmatrix"):
        step = (_matrices if parts[0] == "ldmatrix" else _store_matrices)(program, line, memory)
        return whole(line, step)
    return None


def _addresses(program: Program, operand: Any, kind: str) -> Read:
    assert isinstance(operand, Address)
    offset = np.array([operand.offset]).astype(DTYPES[kind])
    if operand.base is None:
        return lambda warp: np.broadcast_to(offset, LANES)
    read = reader(program, operand.base, kind)
    return lambda warp: np.broadcast_to(read(warp) + offset, LANES)


def _parameter(program: Program, line: Line) -> Step:
    kind = line.name.split(".")[-1]
    to, source = line.operands
    assert isinstance(source, Address)
    assert source.base is not None
    assert source.offset == 0
    write, name = writer(program, str(to), kind), source.base

    def step(warp: Warp, mask: Array | None) -> None:
        held = np.array([warp.parameters[name]])
        given = held.view(DTYPES[kind]) if held.dtype.itemsize == np.dtype(DTYPES[kind]).itemsize \
            else held.astype(DTYPES[kind])  # fmt: skip
        write(warp, mask, given)

    return step


def _where(program: Program, operand: Any, space: str, memory: Any) -> tuple[Read, Any]:
    """Addresses, and what they are addresses of."""
    if space == "shared":
        return _addresses(program, operand, "u32"), lambda: memory.shared
    assert space == "global", space
    return _addresses(program, operand, "u64"), lambda: memory.tensors


def _vector(operand: Any) -> tuple[str, ...]:
    return operand if isinstance(operand, tuple) else (operand,)


def _load(program: Program, line: Line, space: str, memory: Any) -> Step:
    kind = line.name.split(".")[-1]
    names = _vector(line.operands[0])
    address, held = _where(program, line.operands[1], space, memory)
    writes = [writer(program, x, kind) for x in names]
    dtype, size = DTYPES[kind], len(names) * np.dtype(DTYPES[kind]).itemsize

    def step(warp: Warp, mask: Array | None) -> None:
        here = EVERY if mask is None else mask
        found = np.zeros((LANES, len(names)), dtype)
        raw = held().load(address(warp)[here], size, warp, program.warps)
        found[here] = np.ascontiguousarray(raw).view(dtype)
        for i, write in enumerate(writes):
            write(warp, mask, found[:, i])

    return step


def _store(program: Program, line: Line, space: str, memory: Any) -> Step:
    kind = line.name.split(".")[-1]
    address, held = _where(program, line.operands[0], space, memory)
    reads = [reader(program, x, kind) for x in _vector(line.operands[1])]
    dtype = DTYPES[kind]

    def step(warp: Warp, mask: Array | None) -> None:
        here = EVERY if mask is None else mask
        values = np.empty((LANES, len(reads)), dtype)
        for i, read in enumerate(reads):
            values[:, i] = read(warp)
        raw = np.ascontiguousarray(values[here]).view(np.uint8)
        held().store(address(warp)[here], raw, warp, program.warps)

    return step


def _copy(program: Program, line: Line, memory: Any) -> Step:
    """Copies to shared memory: what lay there is lost at once, and they come when waited for."""
    if "commit_group" in line.name:

        def commit(warp: Warp, mask: Array | None) -> None:
            warp.copies.append([])

        return commit
    if "wait_group" in line.name or "wait_all" in line.name:
        left = int(str(line.operands[0])) if line.operands else 0

        def wait(warp: Warp, mask: Array | None) -> None:
            *closed, last = warp.copies
            for group in closed[: len(closed) - left]:
                for to, raw in group:
                    memory.shared.store(to, raw, warp, program.warps)
            warp.copies = [*closed[max(0, len(closed) - left) :], last]

        return wait
    to, _ = _where(program, line.operands[0], "shared", memory)
    source, _ = _where(program, line.operands[1], "global", memory)
    size = int(str(line.operands[2]), 0)
    assert re.fullmatch(r"cp\.async\.c[ag]\.shared\.global(\.L2::\w+)?", line.name), line.name
    some = reader(program, str(line.operands[3]), "u32") if len(line.operands) > 3 else None

    def step(warp: Warp, mask: Array | None) -> None:
        here = EVERY if mask is None else mask
        count = np.broadcast_to(np.array([size]) if some is None else some(warp), LANES)
        raw = np.zeros((LANES, size), np.uint8)  # what is not copied is 0
        full, part = here & (count == size), here & (count > 0) & (count < size)
        if part.any():
            raise Fault(f"a part of {size} bytes is copied: {line.text}")
        if full.any():
            raw[full] = memory.tensors.load(source(warp)[full], size, warp, program.warps)
        at = to(warp)[here]
        memory.shared.store(at, np.full((len(at), size), 0xFF, np.uint8), warp, program.warps)
        warp.copies[-1].append((at, raw[here]))

    return step


def _matrices(program: Program, line: Line, memory: Any) -> Step:
    """`ldmatrix`: 8 rows of 16 bytes each, which as many lanes point to."""
    writes = [writer(program, x, "b32") for x in _vector(line.operands[0])]
    address = _addresses(program, line.operands[1], "u32")
    turned = ".trans." in line.name
    row, pair = np.arange(LANES) // 4, np.arange(LANES) % 4 * 2

    def step(warp: Warp, mask: Array | None) -> None:
        at = address(warp)
        for i, write in enumerate(writes):
            raw = memory.shared.load(at[8 * i : 8 * i + 8], 16, warp, program.warps)
            held = np.ascontiguousarray(raw).view(np.uint16)  # [8, 8]
            if turned:
                held = held.T
            low, high = held[row, pair].astype(np.uint32), held[row, pair + 1].astype(np.uint32)
            write(warp, None, high << np.uint32(16) | low)

    return step


def _store_matrices(program: Program, line: Line, memory: Any) -> Step:
    """`stmatrix`: the same, to memory."""
    address = _addresses(program, line.operands[0], "u32")
    reads = [reader(program, x, "b32") for x in _vector(line.operands[1])]
    assert ".trans." not in line.name, line.name

    def step(warp: Warp, mask: Array | None) -> None:
        at = address(warp)
        for i, read in enumerate(reads):  # a row is what four neighbours hold
            raw = np.ascontiguousarray(read(warp)).view(np.uint8).reshape(8, 16)
            memory.shared.store(at[8 * i : 8 * i + 8], raw, warp, program.warps)

    return step


def shared_memory(size: int, draw: np.random.Generator) -> Bytes:
    """Of one program; nobody may rely on what is in it."""
    return Bytes(draw.integers(0, 256, size, np.uint8), "shared memory", strict=True)
