"""The asm of `lookup_asm`, with Python numbers: every code in every place, against the levels."""

import random
import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvsearch_kernels.codebooks.gaussian import lloyd_levels
from kvsearch_kernels.packed_attention.lookup_asm import SCALE, lookups, tables
from kvsearch_kernels.quantize_kv.reference import Format, dequantize, quantize

WORD = 0xFFFFFFFF
NOISE = 0x5A5A5A5A  # copies of an operand that are not to be read


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


def halves(word):
    """The two fp16 numbers of a word."""
    bits = torch.tensor([word & 0xFFFF, word >> 16], dtype=torch.int32).to(torch.int16)
    return bits.view(torch.float16).tolist()


def wanted(codes, bits, lloyd=True):
    return scaled(lloyd_levels(bits), bits, lloyd)[codes].tolist() if lloyd else codes


def scaled(levels, bits, lloyd):
    return (levels * (SCALE if bits == 2 and lloyd else 1)).half()


def words(n=300):
    """Eight nibbles a word: each one in each place, then any."""
    draw = random.Random(0)
    for nibble in range(16):
        yield nibble * 0x11111111
    for _ in range(n):
        yield draw.getrandbits(32)


def cases(bits):
    """Words, top words, their shifts, and the codes that they mean."""
    draw = random.Random(1)
    for word in words():
        shift, first = draw.choice((0, 2)), draw.randrange(4)
        top = draw.choice([0, 0xFFFFFFFF, draw.getrandbits(32)])
        low = [word >> (4 * i) & 15 for i in range(8)]
        if bits < 4:
            low = [x >> shift & 3 for x in low]
        if bits in (3, 5):
            low = [x | (top >> (4 * i + first) & 1) << (bits - 1) for i, x in enumerate(low)]
        yield word, shift, top, first, low


KINDS = pytest.mark.parametrize(
    ("bits", "lloyd"), [(2, True), (3, True), (4, True), (5, True), (3, False)]
)


def operands(bits, lloyd, word, shift, top, first):
    """As Triton numbers them: one of 32 bits an element comes twice a word."""
    found = [word]
    if bits < 4:
        found += [shift, NOISE]
    if bits in (3, 5):
        found += [top, first + 30 * (bits == 3), NOISE]
    for table in tables(bits, lloyd):
        found += [table, NOISE]
    return found


@KINDS
def test_every_code_in_every_place(bits, lloyd):
    text, constraints = lookups(bits, lloyd)
    for *held, codes in cases(bits):
        given = operands(bits, lloyd, *held)
        assert constraints == ",".join(["=r"] * 4 + ["r"] * len(given))
        for i, out in enumerate(carry_out(text, 4, given)):
            assert halves(out) == wanted([codes[i], codes[i + 4]], bits, lloyd)


@pytest.mark.parametrize("D", [64, 128])
@KINDS
def test_where_channels_are(bits, lloyd, D):
    """Packed rows, read as `lookup_words` reads them: which channels come out where.

    A word of the asm is two neighbours of a row of keys, or of values the same of two rows.
    """
    fmt = Format(bits, D, "lloyd" if lloyd else "uniform")
    packed = quantize(torch.randn(2, D), fmt)
    rows = packed.codes.numpy().view("<u2")
    units = torch.tensor([1.0, 0.0])[: fmt.numbers].half()  # steps of 1, zeros of 0
    level = dequantize(replace(packed, scales=units.expand(2, 1, -1).contiguous()), fmt)
    level = scaled(level, bits, lloyd).tolist()
    W = D // 4
    S = W if bits > 3 else W // 2

    def word(places):
        return int.from_bytes(np.array([rows[r, x] for r, x in places]).tobytes(), "little")

    for w in range(W):
        pairs = [((0, w), (1, w))]
        if w % 2 == 0:
            pairs.append(((0, w), (0, w + 1)))
        for pair in pairs:
            top = word([(r, S + v % (W // 4)) for r, v in pair]) if bits in (3, 5) else 0
            codes = word([(r, v % S) for r, v in pair])
            given = operands(bits, lloyd, codes, w // (W // 2) * 2, top, w // (W // 4))
            for n, out in enumerate(carry_out(lookups(bits, lloyd)[0], 4, given)):
                assert halves(out) == [level[r][2 * v + n // 2 + n % 2 * D // 2] for r, v in pair]
