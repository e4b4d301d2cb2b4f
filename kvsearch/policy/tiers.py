"""Whether a list of tiers makes sense, and whether the quantiser's levels can hold it."""

from collections.abc import Sequence
from itertools import pairwise

from kvsearch.policy.parts import Quantizer, Tier


def check_tiers(tiers: Sequence[Tier], quantizer: Quantizer, where: str = "tiers") -> None:
    """Raise a `ValueError` that starts with the path of the wrong field.

    Args:
        tiers: precisions, best first.
        quantizer: how those below 16 bits are stored.
        where: path of the tiers.
    """
    total = sum(t.share for t in tiers)
    if not tiers or abs(total - 1.0) > 1e-6:
        raise ValueError(f"{where}: shares must add up to 1, got {total:g}")
    for above, below in pairwise(tiers):
        if below.key_bits > above.key_bits or below.value_bits > above.value_bits:
            raise ValueError(f"{where}: bits must not rise from a better tier to a worse one")
    words = [f"levels {quantizer.levels!r}"] * 2
    if quantizer.value_levels is not None:
        words[1] = f"value_levels {quantizer.value_levels!r}"
    sides = list(zip(("key_bits", "value_bits"), words, quantizer.books, strict=True))
    for i, tier in enumerate(tiers):
        for name, levels, book in sides:
            bits = getattr(tier, name)
            if bits not in (16, *book.bits):
                known = ", ".join(map(str, book.bits))
                raise ValueError(f"{where}.{i}.{name}: {levels} know {known} bits, got {bits}")
    if all(t.native for t in tiers):
        return
    if quantizer.along == "tokens" and not quantizer.books[0].columns:
        raise ValueError(f"quantizer.along: {words[0]} have no groups along tokens")
    for _, levels, book in sides:
        if book.group is not None and quantizer.group != book.group:
            got = quantizer.group or "the whole head"
            raise ValueError(f"quantizer.group: {levels} have groups of {book.group}, got {got}")
