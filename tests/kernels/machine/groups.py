"""Products that four warps share, from sm_90 on: `wgmma`. Each warp has 16 of 64 rows.

They run beside the warp: registers and shared memory are theirs until a wait, and only then is
anything read and written here. Where memory changes in between, the product is another one.
"""

from typing import Any

import numpy as np

from machine.arithmetic import Step
from machine.program import Line, Program
from machine.registers import Array, Warp, reader, writer
from machine.together import GROUP, THIRD, numbers, rows_of, whole

SWIZZLED = {0: 16, 1: 128, 2: 64, 3: 32}  # bytes of a row whose pieces of 16 bytes are exchanged


def build(program: Program, line: Line, memory: Any) -> Step | None:
    """How to carry out a line about products of four warps, or a fence; None if it is neither."""
    head, kind = (line.name + "..").split(".")[:2]
    if head == "fence":
        return lambda warp, mask: None
    if head != "wgmma":
        return None
    if kind == "wait_group":
        left = int(str(line.operands[0]))

        def wait(warp: Warp, mask: Array | None) -> None:
            *closed, last = warp.products
            for group in closed[: len(closed) - left]:
                for product in group:
                    product()
            warp.products = [*closed[max(0, len(closed) - left) :], last]

        return whole(line, wait)
    if kind == "commit_group":
        return whole(line, lambda warp, mask: warp.products.append([]))
    return whole(line, _product(program, line, memory)) if kind == "mma_async" else _nothing


def _nothing(warp: Warp, mask: Array | None) -> None:
    """`wgmma.fence` orders registers, which are in order here."""


def _matrix(descriptor: int, rows: int, turned: bool, memory: Any, warp: Warp, warps: int) -> Array:
    """A factor in shared memory as bits `[rows, 16]`; turned, rows are neighbours in memory."""
    start, leading, stride = ((descriptor >> at & 0x3FFF) << 4 for at in (0, 16, 32))
    width = SWIZZLED[descriptor >> 62 & 3]
    row, k = np.meshgrid(np.arange(rows), np.arange(16), indexing="ij")
    if turned:
        each = width // 2
        at = row // each * leading + k // 8 * stride + k % 8 * width + row % each * 2
    else:
        at = row // 8 * stride + row % 8 * width + k * 2
        if width == 16:
            at = row // 8 * stride + row % 8 * 16 + k // 8 * leading + k % 8 * 2
    at = at + start
    if width > 16:
        at = at ^ (at >> 7 & width // 16 - 1) << 4
    raw = memory.shared.load(at.reshape(-1), 2, warp, warps)
    return np.ascontiguousarray(raw).view(np.uint16).reshape(rows, 16)


def _product(program: Program, line: Line, memory: Any) -> Step:
    parts = line.name.split(".")
    n, kind = int(parts[4].split("n")[1].split("k")[0]), parts[-1]
    assert parts[4] == f"m64n{n}k16", line.name
    assert parts[5] == "f32", line.name
    results, first, second, adds, *more = line.operands
    assert isinstance(results, tuple)
    assert [str(x) for x in more[:2]] == ["1", "1"], line.text
    turned = [str(x) == "1" for x in more[2:]]
    sums = [reader(program, x, "f32") for x in results]
    writes = [writer(program, x, "f32") for x in results]
    held = None
    if isinstance(first, tuple):
        held = [reader(program, x, "b32") for x in first]
    a_at = None if held else reader(program, str(first), "b64")
    b_at, keep = reader(program, str(second), "b64"), reader(program, str(adds), "pred")

    def step(warp: Warp, mask: Array | None) -> None:
        a = rows_of(held, warp, kind) if held else None
        a_from = int(a_at(warp)[0]) if a_at else 0
        b_from, going = int(b_at(warp)[0]), bool(keep(warp)[0])
        quarter = warp.number % program.warps % 4

        def carry_out() -> None:
            left = a
            if left is None:
                whole_a = _matrix(a_from, 64, turned[0], memory, warp, program.warps)
                left = numbers(whole_a, kind)[16 * quarter : 16 * quarter + 16]
            right = numbers(_matrix(b_from, n, turned[-1], memory, warp, program.warps), kind)
            found = left @ right.T
            for i, (read, write) in enumerate(zip(sums, writes, strict=True)):
                mine = found[GROUP + 8 * (i % 4 // 2), i // 4 * 8 + 2 * THIRD + i % 2]
                write(warp, None, mine + read(warp) if going else mine)

        warp.products[-1].append(carry_out)

    return step
