"""PTX that looks up Lloyd levels of eight codes, and the tables that it reads.

Operands are the results, the word of codes, at 5 bits the word of top bits and how far to shift it,
and the tables. A word is two elements of 16 bits or four of 8; an operand of 32 bits an element
comes once for each, of which the first is used.
"""

from kvsearch_kernels.codebooks.lloyd import lloyd_levels


def tables(bits: int) -> list[int]:
    """Sizes of levels in fp16, largest first: words (int32) of lower bytes, then of upper ones."""
    import torch

    sizes = lloyd_levels(bits)[: 2 ** (bits - 1)].neg().half().view(torch.int16).tolist()
    rows = [size & 255 for size in sizes] + [size >> 8 for size in sizes]
    words = [rows[i : i + 4] for i in range(0, len(rows), 4)]
    return [int.from_bytes(bytes(four), "little", signed=True) for four in words]


def _asm(
    bits: int, pack: int, outputs: int, halves: list[str], spread: tuple[int, int], joins: list[str]
) -> str:
    """PTX from a word of codes to words of two levels.

    Args:
        bits: of a code, 4 or 5.
        pack: elements of a word.
        outputs: results.
        halves: makes `a` and `b` of `i`; their four lowest nibbles are four of the eight codes.
        spread: bytes of a word and of that word, shifted by a nibble, whose top bits are those of
            the codes in `a`, and in `b`.
        joins: results, from lower bytes `la`, `lb` and upper ones `ha`, `hb`.
    """
    word = outputs
    first = word + 1 if bits == 4 else word + 2 + pack
    table = [f"${first + i * pack}" for i in range(2 ** (bits - 2))]
    bytes_of = {"l": table[: len(table) // 2], "h": table[len(table) // 2 :]}
    pairs = list(zip("ab", spread, strict=True))
    lines = [".reg .b32 i, j, m, n, a, b, sa, sb, la, lb, ha, hb, far"]
    # i: the largest size is number 0; n: where the top bit of a nibble is set the level is positive
    if bits == 4:
        lines += [
            f"and.b32 n, ${word}, 0x88888888",
            "mul.hi.u32 m, n, 0xe0000000",  # 7 in nibbles of positive levels
            f"lop3.b32 i, ${word}, m, 0x77777777, 0x28",  # (word ^ m) & 7s
            f"mov.b32 n, ${word}",
        ]
    else:
        lines += [
            f"shr.u32 n, ${word + 1}, ${word + 2}",
            "and.b32 n, n, 0x11111111",
            "mul.lo.u32 n, n, 15",  # 15 in nibbles of positive levels
            f"xor.b32 j, ${word}, n",
            "and.b32 i, j, 0x77777777",
        ]
    lines += halves
    if bits == 4:
        for y, t in bytes_of.items():
            lines += [f"prmt.b32 {y}{x}, {t[0]}, {t[1]}, {x}" for x in "ab"]
    else:
        lines += [
            "shl.b32 m, j, 4",
            *(f"prmt.b32 s{x}, j, m, 0x{which:04x}" for x, which in pairs),
        ]
        for y, t in bytes_of.items():
            for x in "ab":
                lines += [
                    f"prmt.b32 {y}{x}, {t[0]}, {t[1]}, {x}",
                    f"prmt.b32 far, {t[2]}, {t[3]}, {x}",
                    f"lop3.b32 {y}{x}, s{x}, far, {y}{x}, 0xca",  # s ? far : near
                ]
    lines += [
        "shl.b32 m, n, 4",
        *(f"prmt.b32 s{x}, n, m, 0x{which:04x}" for x, which in pairs),
        *(f"lop3.b32 h{x}, h{x}, s{x}, 0x80808080, 0xf2" for x in "ab"),  # h | (~s & 80s)
        *joins,
    ]
    return "{ " + "; ".join(lines) + "; }"


# Every element by itself: codes 0, 1, 4, 5 in `a` and 2, 3, 6, 7 in `b`, and results 0 and 4, 1 and
# 5, 2 and 6, 3 and 7.
_KEYS = (
    2,
    4,
    ["prmt.b32 a, i, 0, 0x4420", "prmt.b32 b, i, 0, 0x4431"],
    (0xAE8C, 0xBF9D),
    [
        "prmt.b32 $0, la, ha, 0x6240",
        "prmt.b32 $1, la, ha, 0x7351",
        "prmt.b32 $2, lb, hb, 0x6240",
        "prmt.b32 $3, lb, hb, 0x7351",
    ],
)
KEYS_4 = _asm(4, *_KEYS)
KEYS_5 = _asm(5, *_KEYS)
# Codes in order; results 0 and 2, 4 and 6, and 1 and 3, 5 and 7.
VALUES_LOW, VALUES_HIGH = (
    _asm(
        4,
        4,
        2,
        ["mov.b32 a, i", "shr.u32 b, i, 16"],
        (0x9D8C, 0xBFAE),
        [f"prmt.b32 $0, la, ha, {which}", f"prmt.b32 $1, lb, hb, {which}"],
    )
    for which in ("0x6240", "0x7351")
)
