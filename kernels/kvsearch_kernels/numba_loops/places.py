# mypy: ignore-errors
"""Slots by number, and how many are in use."""

import numpy as np
from numba import carray

from kvsearch_kernels.numba_loops.compiled import compiled
from kvsearch_kernels.numba_loops.memory import pointer
from kvsearch_kernels.numba_loops.rows import LENGTHS, SLOTS


@compiled()
def slot(slots, b, h, i):
    """The `i`-th slot asked for, in one head."""
    address, of_batch, of_head, of_slot = slots
    if address == 0:
        return i
    return carray(pointer(address + 8 * (b * of_batch + h * of_head + i * of_slot)), 1, np.int64)[0]


@compiled()
def slots_in_use(part, b, h, heads):
    """Slots of a part in use in one head."""
    if part[LENGTHS] == 0:
        return part[SLOTS]
    return carray(pointer(part[LENGTHS] + 4 * (b * heads + h)), 1, np.int32)[0]


@compiled()
def slots_of(parts):
    """Slots of all parts."""
    slots = 0
    for part in parts:
        slots += part[SLOTS]
    return slots
