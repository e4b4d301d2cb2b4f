"""A few instructions of PTX, carried out with Python numbers, for asm that no interpreter runs."""

import re
from collections.abc import Sequence

WORD = 0xFFFFFFFF


def prmt(a: int, b: int, selector: int) -> int:
    """Four bytes among the eight of `a` and `b`; a selector's top bit spreads a byte's sign."""
    pool = (a | b << 32).to_bytes(8, "little")
    found = []
    for i in range(4):
        which = selector >> (4 * i) & 15
        byte = pool[which & 7]
        found.append((0xFF if byte & 0x80 else 0) if which & 8 else byte)
    return int.from_bytes(bytes(found), "little")


def lop3(a: int, b: int, c: int, table: int) -> int:
    """Bit by bit the table's entry of three bits."""
    found = 0
    for i in range(8):
        here = (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        found |= here if table >> i & 1 else 0
    return found & WORD


RULES = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "shl.b32": lambda a, b: a << b if b < 32 else 0,
    "shr.u32": lambda a, b: a >> b if b < 32 else 0,
    "shf.r.wrap.b32": lambda low, high, n: (high << 32 | low) >> (n & 31),
    "mul.lo.u32": lambda a, b: a * b,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "mul.hi.u32": lambda a, b: a * b >> 32,
    "prmt.b32": prmt,
    "lop3.b32": lop3,
}


def carry_out(text: str, outputs: int, operands: Sequence[int]) -> list[int]:
    """Words `$0` to `$outputs - 1` of the text; operands are those behind."""
    held = {f"${outputs + i}": x & WORD for i, x in enumerate(operands)}
    for line in text.strip("{} ").split(";"):
        if not line.strip() or line.split()[0] == ".reg":
            continue
        name, rest = line.split(None, 1)
        to, *sources = (x.strip() for x in rest.split(","))
        values = [held[x] if re.match(r"[a-z$]", x) else int(x, 0) for x in sources]
        held[to] = RULES[name](*values) & WORD
    return [held[f"${i}"] for i in range(outputs)]
