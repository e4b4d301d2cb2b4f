"""How the heads of a layer share its slots (AdaKV, arXiv:2407.11550)."""

from collections.abc import Sequence


def shares(counts: Sequence[int], even: int, room: Sequence[int], floor: float) -> list[int]:
    """Evictable slots that each head keeps; they add up to `even` for every head.

    Args:
        counts: of the layer's best-ranked slots, how many each head has.
        even: slots of an even split.
        room: slots that each head has.
        floor: share of an even split that every head gets.
    """
    exact = [floor * even + (1 - floor) * n for n in counts]
    got = [min(int(x), most) for x, most in zip(exact, room, strict=True)]
    order = sorted(range(len(got)), key=lambda h: got[h] - exact[h])
    missing = even * len(got) - sum(got)
    while missing:  # what rounding, or a head with no more slots, has left over
        for h in order:
            if missing and got[h] < room[h]:
                got[h] += 1
                missing -= 1
    return got
