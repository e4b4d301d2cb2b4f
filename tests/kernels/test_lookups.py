"""The asm of `lookup_asm`, carried out: every code in every place, against the levels."""

import random

import pytest
import torch
from ptx import carry_out

from kvsearch_kernels.codebooks.lloyd import lloyd_levels
from kvsearch_kernels.decode_attention import lookup_asm
from kvsearch_kernels.decode_attention.lookup_asm import tables


def halves(word):
    """The two fp16 numbers of a word."""
    bits = torch.tensor([word & 0xFFFF, word >> 16], dtype=torch.int32).to(torch.int16)
    return bits.view(torch.float16).tolist()


def wanted(codes, bits):
    return lloyd_levels(bits).half()[codes].tolist()


def words(n=400):
    """Eight codes a word: each code in each place, then any."""
    draw = random.Random(0)
    for code in range(16):
        yield code * 0x11111111
    for _ in range(n):
        yield draw.getrandbits(32)


def nibbles(word):
    return [word >> (4 * i) & 15 for i in range(8)]


def test_keys_of_4_bits():
    # an operand of 32 bits an element comes twice a word, of which the first is used
    sizes = [x for word in tables(4) for x in (word, 0)]
    for word in words():
        found = carry_out(lookup_asm.KEYS_4, 4, [word, *sizes])
        code = nibbles(word)
        for i, out in enumerate(found):
            assert halves(out) == wanted([code[i], code[i + 4]], 4)


@pytest.mark.parametrize("shift", range(4))
def test_keys_of_5_bits(shift):
    sizes = [x for word in tables(5) for x in (word, 0)]
    tops = random.Random(1)
    for word in words():
        top = tops.choice([0, 0xFFFFFFFF, tops.getrandbits(32)])
        found = carry_out(lookup_asm.KEYS_5, 4, [word, top, shift, 99, *sizes])
        code = [c | (t >> shift & 1) << 4 for c, t in zip(nibbles(word), nibbles(top), strict=True)]
        for i, out in enumerate(found):
            assert halves(out) == wanted([code[i], code[i + 4]], 5)


def test_values_of_4_bits():
    sizes = [x for word in tables(4) for x in (word, 0, 0, 0)]
    for word in words():
        code = nibbles(word)  # byte i holds codes 2i and 2i + 1, of the lower and the upper channel
        for first, text in enumerate((lookup_asm.VALUES_LOW, lookup_asm.VALUES_HIGH)):
            found = carry_out(text, 2, [word, *sizes])
            assert [x for out in found for x in halves(out)] == wanted(code[first::2], 4)
