"""What every lane does for itself: numbers to numbers. A rule takes arrays and gives one."""

from collections.abc import Callable
from typing import Any

import numpy as np

from machine.program import Line, Program
from machine.registers import DTYPES, Array, Warp, reader, writer

Step = Callable[[Warp, "Array | None"], None]
Rule = Callable[..., Any]


NIBBLES = np.array([0, 4, 8, 12], np.uint32)


def _truncated(a: Array, b: Array) -> Array:
    """Whole quotients rounded to 0."""
    whole = np.abs(a.astype(np.int64)) // np.abs(b.astype(np.int64))
    return np.where((a < 0) != (b < 0), -whole, whole)


def _shift(a: Array, n: Array, left: bool) -> Array:
    """A shift by the whole width or more leaves 0, or the sign."""
    size = 8 * a.dtype.itemsize
    far = n >= size
    by = np.where(far, size - 1, n).astype(a.dtype)
    found = (a << by) if left else (a >> by)
    rest = np.zeros_like(found) if left or a.dtype.kind == "u" else found
    return np.where(far, rest, found)


def _field(a: Array, at: Array, length: Array) -> Array:
    """Bits of `a`, with the sign of the uppermost where `a` has one."""
    found = (a.astype(np.int64) >> at.astype(np.int64)) & ((1 << length.astype(np.int64)) - 1)
    if a.dtype.kind == "i":
        top = np.int64(1) << (length.astype(np.int64) - 1)
        found = (found ^ top) - top
    return found


def prmt(a: Array, b: Array, selector: Array) -> Array:
    """Four bytes among the eight of `a` and `b`; a selector's top bit spreads a byte's sign."""
    n = max(len(a), len(b), len(selector))
    words = np.empty((n, 2), np.uint32)
    words[:, 0], words[:, 1] = a, b
    which = np.broadcast_to(selector.astype(np.uint32), n)[:, None] >> NIBBLES
    found = np.take_along_axis(words.view(np.uint8), (which & 7).astype(np.intp), 1)
    signs = (found.view(np.int8) >> 7).view(np.uint8)
    return np.where(which & 8, signs, found).view(np.uint32)[:, 0]


def lop3(a: Array, b: Array, c: Array, table: Array) -> Array:
    """Bit by bit the table's entry of three bits."""
    found = np.uint32(0)
    for i in range(8):
        if int(table[0]) >> i & 1:
            found = found | (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return found


def flush(x: Array) -> Array:
    """Subnormal fp32 numbers as 0."""
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)


def to_bf16(x: Array) -> Array:
    """The upper halves of fp32, rounded to even."""
    bits = x.astype(np.float32).view(np.uint32)
    found = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FFF), found).astype(np.uint16)


def from_bf16(x: Array) -> Array:
    """Fp32 of bits of bf16."""
    return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _fused(a: Array, b: Array, c: Array) -> Array:
    """Rounded once: in fp64 products of fp32 are exact, in extended precision nearly of fp64."""
    wide = np.float64 if a.dtype == np.float32 else np.longdouble
    return (a.astype(wide) * b.astype(wide) + c.astype(wide)).astype(a.dtype)


COMPARE: dict[str, Rule] = {
    "eq": np.equal, "ne": lambda a, b: (a != b) & ~np.isnan(a * 1.0) & ~np.isnan(b * 1.0),
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "neu": np.not_equal, "equ": lambda a, b: ~(a != b) | np.isnan(a) | np.isnan(b),
    "ltu": lambda a, b: ~(a >= b), "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b), "geu": lambda a, b: ~(a < b),
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)), "nan": lambda a, b: np.isnan(a) | np.isnan(b),
}  # fmt: skip

RULES: dict[str, Rule] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "mul.lo": lambda a, b: a * b,
    "mul.hi": lambda a, b: (a.astype(np.uint64) * b.astype(np.uint64)) >> np.uint64(32),
    "mad.lo": lambda a, b, c: a * b + c,
    "fma": _fused,
    "div.s": _truncated,
    "div": lambda a, b: a / b if a.dtype.kind == "f" else a // b,
    "rem": lambda a, b: a - (b * _truncated(a, b)).astype(a.dtype),
    "sqrt": np.sqrt,
    "rcp": lambda a: np.float32(1) / a,
    "rsqrt": lambda a: (1 / np.sqrt(a.astype(np.float64))).astype(np.float32),
    "ex2": lambda a: np.exp2(a.astype(np.float64)).astype(np.float32),
    "lg2": lambda a: np.log2(a.astype(np.float64)).astype(np.float32),
    "sin": lambda a: np.sin(a.astype(np.float64)).astype(np.float32),
    "cos": lambda a: np.cos(a.astype(np.float64)).astype(np.float32),
    "tanh": lambda a: np.tanh(a.astype(np.float64)).astype(np.float32),
    "min": lambda a, b: np.fmin(a, b) if a.dtype.kind == "f" else np.minimum(a, b),
    "max": lambda a, b: np.fmax(a, b) if a.dtype.kind == "f" else np.maximum(a, b),
    "neg": np.negative,
    "abs": np.abs,
    "not": np.invert,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "shl": lambda a, n: _shift(a, n, True),
    "shr": lambda a, n: _shift(a, n, False),
    "bfe": _field,
    "prmt": prmt,
    "lop3": lop3,
    "mov": lambda a: a,
    "popc": np.bitwise_count,
    "copysign": lambda a, b: np.copysign(b, a),
    "shf.r.wrap": lambda low, high, n: (
        (high.astype(np.uint64) << np.uint64(32) | low) >> (n & np.uint32(31)).astype(np.uint64)
    ),
    "shf.l.wrap": lambda low, high, n: (
        (high.astype(np.uint64) << np.uint64(32) | low) << (n & np.uint32(31)).astype(np.uint64)
    ) >> np.uint64(32),
}  # fmt: skip


def rule_of(name: str) -> Rule | None:
    """The rule of an instruction, by the longest beginning of its name."""
    parts = name.split(".")
    if parts[0] == "div" and parts[-1][0] == "s":
        return RULES["div.s"]
    for n in (3, 2, 1):
        if found := RULES.get(".".join(parts[:n])):
            return found
    return None


def build(program: Program, line: Line) -> Step | None:
    """How to carry out a line that is one rule; None if it is none."""
    parts = line.name.split(".")
    kind = parts[-1]
    to, *sources = line.operands
    if parts[0] == "cvt":
        return _convert(program, line)
    if parts[0] == "mov" and any(isinstance(x, tuple) for x in line.operands):
        return _taken_apart(program, line)
    if parts[0] == "setp":
        compare = COMPARE[parts[1]]
        first, second = (reader(program, str(x), kind) for x in sources)
        write = writer(program, str(to), "pred")
        return lambda warp, mask: write(warp, mask, compare(first(warp), second(warp)))
    if parts[0] == "selp":
        a, b = (reader(program, str(x), kind) for x in sources[:2])
        which, write = reader(program, str(sources[2]), "pred"), writer(program, str(to), kind)
        return lambda warp, mask: write(warp, mask, np.where(which(warp), a(warp), b(warp)))
    if parts[1] == "wide":
        return _wide(program, line)
    rule = rule_of(line.name)
    if rule is None:
        return None
    shifts = parts[0] in ("shl", "shr", "bfe")
    reads = [
        reader(program, str(x), "u32" if shifts and i else kind) for i, x in enumerate(sources)
    ]
    write, ftz = writer(program, str(to), kind), "ftz" in parts

    def step(warp: Warp, mask: Array | None) -> None:
        given = [read(warp) for read in reads]
        if ftz:
            write(warp, mask, flush(rule(*map(flush, given))))
        else:
            write(warp, mask, rule(*given))

    return step


def _wide(program: Program, line: Line) -> Step:
    """`mul.wide` and `mad.wide`: products, and what is added, twice as wide."""
    kind = line.name.split(".")[-1]
    twice = f"{kind[0]}{2 * int(kind[1:])}"
    a, b = (reader(program, str(x), kind) for x in line.operands[1:3])
    more = [reader(program, str(x), twice) for x in line.operands[3:]]
    write, dtype = writer(program, str(line.operands[0]), twice), DTYPES[twice]

    def step(warp: Warp, mask: Array | None) -> None:
        found = a(warp).astype(dtype) * b(warp).astype(dtype)
        for read in more:
            found = found + read(warp)
        write(warp, mask, found)

    return step


def _convert(program: Program, line: Line) -> Step:
    parts = line.name.split(".")
    to, source = parts[-2], parts[-1]
    write = writer(program, str(line.operands[0]), to)
    reads = [reader(program, str(x), source) for x in line.operands[1:]]
    if to.endswith("x2"):  # the second operand is the lower half
        half = to_bf16 if to == "bf16x2" else (lambda x: x.astype(np.float16).view(np.uint16))

        def step(warp: Warp, mask: Array | None) -> None:
            upper, lower = (half(read(warp)).astype(np.uint32) for read in reads)
            write(warp, mask, upper << np.uint32(16) | lower)

        return step
    (read,), dtype = reads, DTYPES[to]
    rounds = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}.get(parts[1])

    def value(x: Array) -> Any:
        if source == "bf16":
            x = from_bf16(x)
        if rounds is not None:
            x = rounds(x)
        if to == "bf16":
            return to_bf16(x)
        if x.dtype.kind == "f" and np.issubdtype(dtype, np.integer):
            held = np.iinfo(dtype)
            wide = np.nan_to_num(x.astype(np.longdouble), nan=0.0)
            return np.clip(wide, held.min, held.max).astype(dtype)
        return x.astype(dtype)

    return lambda warp, mask: write(warp, mask, value(read(warp)))


def _taken_apart(program: Program, line: Line) -> Step:
    """`mov` between a register and its parts, the lowest first."""
    to, source = line.operands
    size = int(line.name.split(".")[-1][1:])
    if isinstance(to, tuple):
        part, read = size // len(to), reader(program, str(source), f"b{size}")
        writes = [writer(program, x, f"b{part}") for x in to]
        shifts = [np.array([i * part], DTYPES[f"b{size}"]) for i in range(len(to))]

        def split(warp: Warp, mask: Array | None) -> None:
            whole = read(warp)
            for write, shift in zip(writes, shifts, strict=True):
                write(warp, mask, (whole >> shift).astype(DTYPES[f"b{part}"]))

        return split
    assert isinstance(source, tuple)
    part, dtype = size // len(source), DTYPES[f"b{size}"]
    reads = [reader(program, x, f"b{part}") for x in source]
    write = writer(program, str(to), f"b{size}")

    def join(warp: Warp, mask: Array | None) -> None:
        found = np.zeros(1, dtype)
        for i, read in enumerate(reads):
            found = found | read(warp).astype(dtype) << np.array([i * part], dtype)
        write(warp, mask, found)

    return join
