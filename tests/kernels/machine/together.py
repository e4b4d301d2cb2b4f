"""Instructions that lanes of a warp carry out together."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from machine.arithmetic import Step, from_bf16
from machine.memory import Fault
from machine.program import Line, Program
from machine.registers import LANES, Array, Read, Warp, reader, writer

LANE = np.arange(LANES)
GROUP, THIRD = LANE // 4, LANE % 4


def build(program: Program, line: Line) -> Step | None:
    """How to carry out an exchange or a product; None if a line is neither."""
    parts = line.name.split(".")
    found = {"shfl": _exchange, "redux": _reduce, "mma": _product, "vote": _vote}.get(parts[0])
    if found is None:
        return None
    return whole(line, found(program, line))


def whole(line: Line, step: Step) -> Step:
    """A step that needs all lanes."""

    def checked(warp: Warp, mask: Array | None) -> None:
        if mask is not None:
            raise Fault("lanes are missing")
        step(warp, None)

    return checked


def _exchange(program: Program, line: Line) -> Step:
    mode = line.name.split(".")[2]
    to, source, by, limits, members = (str(x) for x in line.operands)
    read, write = reader(program, source, "b32"), writer(program, to, "b32")
    offset, bound = reader(program, by, "u32"), reader(program, limits, "u32")
    assert int(members) == -1, line.text

    def step(warp: Warp, mask: Array | None) -> None:
        n, c = offset(warp).astype(np.int64), bound(warp).astype(np.int64)
        segment = (c >> 8) & 31
        most, least = (LANE & segment) | (c & 31 & ~segment), LANE & segment
        if mode == "up":
            other = LANE - n
            fits = other >= most
        elif mode == "down":
            other = LANE + n
            fits = other <= most
        else:
            other = LANE ^ n if mode == "bfly" else least | (n & ~segment)
            fits = other <= most
        write(warp, None, read(warp)[np.where(fits, other, LANE)])

    return step


def _reduce(program: Program, line: Line) -> Step:
    how = line.name.split(".")[2]
    kind = line.name.split(".")[3]
    read = reader(program, str(line.operands[1]), kind)
    write = writer(program, str(line.operands[0]), kind)
    rule: Any = {"add": np.add, "min": np.minimum, "max": np.maximum, "or": np.bitwise_or,
                 "and": np.bitwise_and, "xor": np.bitwise_xor}[how]  # fmt: skip

    def step(warp: Warp, mask: Array | None) -> None:
        held = np.broadcast_to(read(warp), LANES)
        write(warp, None, rule.reduce(held, dtype=held.dtype))

    return step


def _vote(program: Program, line: Line) -> Step:
    how = line.name.split(".")[2]
    read = reader(program, str(line.operands[1]), "pred")
    write = writer(program, str(line.operands[0]), "pred" if how in ("any", "all") else "b32")

    def step(warp: Warp, mask: Array | None) -> None:
        held = np.broadcast_to(read(warp), LANES)
        if how == "ballot":
            write(warp, None, np.uint32((held.astype(np.uint64) << LANE.astype(np.uint64)).sum()))
        else:
            write(warp, None, held.any() if how == "any" else held.all())

    return step


def halves(word: Array, kind: str) -> Array:
    """Fp64 `[32, 2]` of two numbers a word."""
    pair = np.stack([word & np.uint32(0xFFFF), word >> np.uint32(16)], -1).astype(np.uint16)
    return numbers(pair, kind)


def numbers(bits: Array, kind: str) -> Array:
    """Fp64 of the bits of f16 or bf16."""
    return (from_bf16(bits) if kind == "bf16" else bits.view(np.float16)).astype(np.float64)


def rows_of(reads: Sequence[Read], warp: Warp, kind: str) -> Array:
    """The first factor of a product, `[16, 16]`, of four words a lane."""
    a = np.empty((16, 16))
    for i, read in enumerate(reads):
        pair = halves(read(warp), kind)
        for j in range(2):
            a[GROUP + 8 * (i % 2), 2 * THIRD + j + 8 * (i // 2)] = pair[:, j]
    return a


def _product(program: Program, line: Line) -> Step:
    """`mma.m16n8k16`: `[16, 16]` times `[16, 8]`, added up without rounding between."""
    parts = line.name.split(".")
    assert parts[:6] == ["mma", "sync", "aligned", "m16n8k16", "row", "col"], line.name
    assert parts[6] == parts[9] == "f32", line.name
    kind = parts[7]
    names = [x if isinstance(x, tuple) else (x,) for x in line.operands]
    writes = [writer(program, x, "f32") for x in names[0]]
    a_reads, b_reads = ([reader(program, str(x), "b32") for x in n] for n in names[1:3])
    c_reads = [reader(program, str(x), "f32") for x in names[3]]

    def step(warp: Warp, mask: Array | None) -> None:
        a, b, c = rows_of(a_reads, warp, kind), np.empty((16, 8)), np.empty((16, 8))
        for i, read in enumerate(b_reads):
            pair = halves(read(warp), kind)
            for j in range(2):
                b[2 * THIRD + j + 8 * i, GROUP] = pair[:, j]
        for i, read in enumerate(c_reads):
            c[GROUP + 8 * (i // 2), 2 * THIRD + i % 2] = read(warp)
        found = a @ b + c
        for i, write in enumerate(writes):
            write(warp, None, found[GROUP + 8 * (i // 2), 2 * THIRD + i % 2])

    return step
