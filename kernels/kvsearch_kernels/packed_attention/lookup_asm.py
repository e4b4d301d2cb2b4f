"""PTX that looks up the levels of eight codes, and the tables that it reads.

Operands are the results; the word of codes, a nibble each; at 2 and 3 bits how far to shift it; at
3 and 5 bits the word of top bits and how far to shift that; and the tables. A word is two elements
of 16 bits; an operand of 32 bits an element comes once for each, and only the first is used.
"""

from kvsearch_kernels.codebooks.gaussian import lloyd_levels

# Levels of 2 bits are looked up times this number. Their sizes, 0.4528 and 1.5104, are then the
# fp16 numbers 0x387E and 0x3F7E, to 2 parts in 100000 (rounding alone may be off by 49). So the
# lower byte of all four levels is the same, and only the upper one is looked up.
SCALE = 1150 / 2048 / 0.4528
ALIKE = 0x7E7E7E7E
RESULTS = 4  # words of two levels


def tables(bits: int, lloyd: bool = True) -> list[int]:
    """Levels in fp16 as words (int32): of all lower bytes, then of all upper ones.

    At 2 and 3 bits the levels in rising order; at 4 and 5 their sizes, the largest first. Evenly
    spaced ones are the codes themselves, of 3 bits. Lower bytes that are the same in all levels are
    left out: 0 of evenly spaced ones, those of `ALIKE` at 2 bits.
    """
    import torch

    if not lloyd:
        uppers = torch.arange(8, device="cpu").half().view(torch.int16) >> 8
        return [int.from_bytes(bytes(uppers[i : i + 4].tolist()), "little") for i in (0, 4)]
    levels = lloyd_levels(bits) * (SCALE if bits == 2 else 1.0)
    chosen = levels if bits < 4 else levels[: 2 ** (bits - 1)].neg()
    bytes_of = [x & 0xFFFF for x in chosen.half().view(torch.int16).tolist()]
    rows = [x & 255 for x in bytes_of if bits > 2] + [x >> 8 for x in bytes_of]
    words = [rows[i : i + 4] for i in range(0, len(rows), 4)]
    return [int.from_bytes(bytes(four), "little", signed=True) for four in words]


class _Operands:
    """Names of the operands of a text, by what they are."""

    def __init__(self, bits: int, lloyd: bool) -> None:
        at, pack = RESULTS, 2
        self.word, at = f"${at}", at + 1
        if bits < 4:
            self.shift, at = f"${at}", at + pack
        if bits in (3, 5):
            self.top, at = f"${at}", at + 1
            self.first, at = f"${at}", at + pack
        n = len(tables(bits, lloyd))
        words = [f"${at + i * pack}" for i in range(n)]
        both = lloyd and bits > 2
        self.tables = {"l": words[: n // 2], "h": words[n // 2 :]} if both else {"h": words}
        self.count = at + n * pack - RESULTS


def _codes(bits: int, o: _Operands) -> list[str]:
    """`i`, what is looked up, a nibble each; at 5 bits `j`, the same with a fourth bit.

    Where levels have sizes, the top bits of `n` are set where they are positive, one a nibble.
    """
    if bits == 4:
        return [
            f"and.b32 n, {o.word}, 0x88888888",
            "mul.hi.u32 m, n, 0xe0000000",  # 7 in nibbles of positive levels
            f"lop3.b32 i, {o.word}, m, 0x77777777, 0x28",  # (word ^ m) & 7s: size 0 is the largest
            f"mov.b32 n, {o.word}",
        ]
    if bits == 5:
        return [
            f"shr.u32 n, {o.top}, {o.first}",
            "and.b32 n, n, 0x11111111",
            "mul.lo.u32 n, n, 15",  # 15 in nibbles of positive levels
            f"xor.b32 j, {o.word}, n",
            "and.b32 i, j, 0x77777777",
        ]
    lines = [f"shr.u32 i, {o.word}, {o.shift}", "and.b32 i, i, 0x33333333"]
    if bits == 3:
        lines += [
            f"shf.r.wrap.b32 n, {o.top}, {o.top}, {o.first}",
            "lop3.b32 i, n, 0x44444444, i, 0xea",  # (n & 4s) | i
        ]
    return lines


def lookups(bits: int, lloyd: bool = True) -> tuple[str, str]:
    """PTX from a word of codes to words of levels, and its constraints.

    Four results, of the lowest to the highest nibble of both elements. Every element stands for
    itself: codes 0, 1, 4, 5 are in `a` and 2, 3, 6, 7 in `b`.

    Args:
        bits: of a code.
        lloyd: whether levels are Lloyd's, or the codes themselves.
    """
    o = _Operands(bits, lloyd)
    # bytes of a word and of that word, shifted by a nibble, whose top bits are those of the codes
    masks = ["prmt.b32 sa, %s, m, 0xae8c", "prmt.b32 sb, %s, m, 0xbf9d"]
    lines = [".reg .b32 i, j, m, n, a, b, sa, sb, la, lb, ha, hb, far", *_codes(bits, o)]
    lines += ["prmt.b32 a, i, 0, 0x4420", "prmt.b32 b, i, 0, 0x4431"]
    for y, words in o.tables.items():
        near = (words * 2)[:2]
        lines += [f"prmt.b32 {y}{x}, {near[0]}, {near[1]}, {x}" for x in "ab"]
    if bits == 5:
        lines += ["shl.b32 m, j, 4", *(x % "j" for x in masks)]
        for y, words in o.tables.items():
            for x in "ab":
                lines += [
                    f"prmt.b32 far, {words[2]}, {words[3]}, {x}",
                    f"lop3.b32 {y}{x}, s{x}, far, {y}{x}, 0xca",  # s ? far : near
                ]
    if bits in (4, 5):
        lines += ["shl.b32 m, n, 4", *(x % "n" for x in masks)]
        lines += [f"lop3.b32 h{x}, h{x}, s{x}, 0x80808080, 0xf2" for x in "ab"]  # h | (~s & 80s)
    if "l" not in o.tables:
        lines += [f"mov.b32 l{x}, {ALIKE if lloyd else 0}" for x in "ab"]
    lines += [
        "prmt.b32 $0, la, ha, 0x6240",
        "prmt.b32 $1, la, ha, 0x7351",
        "prmt.b32 $2, lb, hb, 0x6240",
        "prmt.b32 $3, lb, hb, 0x7351",
    ]
    return "{ " + "; ".join(lines) + "; }", ",".join(["=r"] * RESULTS + ["r"] * o.count)
