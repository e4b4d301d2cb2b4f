"""Inline asm by itself, carried out on the machine."""

import re
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
from machine import arithmetic
from machine.program import Program, read_body
from machine.registers import Warp


@cache
def _built(text: str, count: int) -> tuple[Program, list[Callable[..., None]]]:
    program = Program("asm", warps=1)
    for i in range(count):
        program.register(f"%r{i}", "w")
    read_body(program, re.sub(r"\$(\d+)", r"%r\1", text))
    steps = [arithmetic.build(program, line) for line in program.lines]
    assert None not in steps, text
    return program, [step for step in steps if step]


def carry_out(text: str, outputs: int, operands: Sequence[int]) -> list[int]:
    """Words `$0` to `$outputs - 1` of the text; operands are those behind."""
    program, steps = _built(text, outputs + len(operands))
    warp = Warp(program, 0, (0, 0, 0), (1, 1, 1), {}, 0)
    for i, word in enumerate(operands):
        warp.row("w", outputs + i, np.uint32)[:] = word & 0xFFFFFFFF
    for step in steps:
        step(warp, None)
    return [int(warp.row("w", i, np.uint32)[0]) for i in range(outputs)]
