"""One launch: programs in any order, their warps in any order between barriers."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch

from machine import access, arithmetic, groups, together
from machine.arithmetic import Step
from machine.memory import Bytes, Fault, Tensors
from machine.program import Line, Program
from machine.registers import LANES, Array, Warp, reader

END = np.iinfo(np.int64).max
EVERY = np.ones(LANES, np.bool_)


@dataclass
class Memory:
    """What the programs of a launch share, and what one has for itself."""

    tensors: Tensors
    shared: Bytes


class Kernel:
    """A program that can be launched."""

    def __init__(self, program: Program, shared: int) -> None:
        self.program, self.size = program, shared
        self.memory = Memory(Tensors([]), Bytes(np.zeros(0, np.uint8), "no memory"))
        self.steps = [self._step(line) for line in program.lines]
        self.guards = [
            line.guard and (reader(program, line.guard[0], "pred"), line.guard[1])
            for line in program.lines
        ]

    def _step(self, line: Line) -> tuple[str, Step]:
        """Step, jump, barrier or end: what a line is to a warp; and what it does."""
        head = line.name.split(".")[0]
        if head in ("bra", "brx"):
            return "jump", self._jump(line)
        if line.name.startswith("bar.warp"):
            return "step", _nothing
        if head in ("bar", "barrier", "ret", "exit"):
            return ("end" if head in ("ret", "exit") else "barrier"), _nothing
        step = (
            together.build(self.program, line)
            or access.build(self.program, line, self.memory)
            or groups.build(self.program, line, self.memory)
            or arithmetic.build(self.program, line)
        )
        if step is None:
            raise NotImplementedError(line.text)
        return "step", step

    def _jump(self, line: Line) -> Step:
        labels = self.program.labels
        if line.name.startswith("brx"):
            names = self.program.tables[str(line.operands[1])]
            which = reader(self.program, str(line.operands[0]), "u32")
        else:
            names, which = [str(line.operands[0])], lambda warp: np.zeros(LANES, np.uint32)
        targets = np.array([labels[name] for name in names])

        def jump(warp: Warp, mask: Array | None) -> None:
            warp.at[mask] = targets[np.broadcast_to(which(warp), LANES)[mask]]

        return jump

    def launch(self, grid: tuple[int, ...], values: Sequence[Any], seed: int = 0) -> None:
        """Run all programs; `values` are tensors and numbers, as the parameters come."""
        draw = np.random.default_rng(seed)
        self.memory.tensors = Tensors([x for x in values if isinstance(x, torch.Tensor)])
        given = {}
        for (kind, name), value in zip(self.program.parameters, values, strict=True):
            plain = value.data_ptr() if isinstance(value, torch.Tensor) else value
            given[name] = np.array([plain]).astype(access.DTYPES[kind])[0]
        places = [(x, y, z) for z, y, x in product(*(range(n) for n in reversed(grid)))]
        with np.errstate(all="ignore"):
            for index in draw.permutation(len(places)):
                self.memory.shared = access.shared_memory(self.size, draw)
                count = self.program.warps
                warps = [
                    Warp(self.program, i, places[index], grid, given, int(index))
                    for i in range(count)
                ]
                while warps:
                    order = draw.permutation(len(warps))
                    state = {i: self._run(warps[i]) for i in order}
                    if len({*state.values()}) > 1:
                        raise Fault(f"{self.program.name}: not all warps come to a barrier")
                    if state[0] == "end":
                        break
                    for warp in warps:
                        warp.epoch += 1

    def _run(self, warp: Warp) -> str:
        """Carry out lines until a barrier or the end; lanes that are behind come first."""
        at, whole = _place(warp)
        try:
            while at != END:
                here = EVERY if whole else warp.at == at
                active, guard = here, self.guards[at]
                if guard is not None:
                    active = here & (guard[0](warp) ^ guard[1])
                kind, step = self.steps[at]
                if kind == "step":
                    if active is EVERY or active.all():
                        step(warp, None)
                    elif active.any():
                        step(warp, active)
                    if whole:  # `warp.at` is behind, until lanes part
                        at += 1
                        continue
                warp.at[here] = at + 1
                if kind == "jump":
                    step(warp, active)
                elif kind == "end":
                    warp.at[active] = END
                elif kind == "barrier":
                    if not active.all():
                        raise Fault("lanes are missing")
                    return kind
                at, whole = _place(warp)
        except Fault as fault:
            where = f"{self.program.name}, warp {warp.number}: {self.program.lines[at].text}"
            raise Fault(f"{where}: {fault}") from None
        return "end"


def _nothing(warp: Warp, mask: Array | None) -> None:
    """What a barrier does to registers and memory."""


def _place(warp: Warp) -> tuple[int, bool]:
    """The line where the lanes are that are furthest behind, and whether that is all of them."""
    at = int(warp.at.min())
    return at, bool((warp.at == at).all())
