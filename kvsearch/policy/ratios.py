"""How a share of pruned channels is spread over the layers (KVPruner, equations 1 and 2).

What a layer's attention is worth is the rise in perplexity without it, any real number.
"""

import math
from collections.abc import Sequence


def uniform(layers: int, ratio: float) -> list[float]:
    """The same share of every layer."""
    return [ratio] * layers


def by_rise(
    rise: Sequence[float], ratio: float, *, temperature: float = 1.0, cap: float = 1.0
) -> list[float]:
    """Equation 1: shares in proportion to exp(-rise / temperature), of mean `ratio`.

    As printed the shares add up to `ratio` and their mean is an Nth of it, so the factor N is put
    back. A share above `cap` is cut to it, and the rest goes to the other layers in proportion.

    Args:
        rise: in perplexity, per layer.
        ratio: mean share, at most `cap`.
        temperature: in units of perplexity; the paper has 1.
        cap: largest share of a layer, at most 1.
    """
    if not 0 <= ratio <= cap <= 1 or temperature <= 0:
        raise ValueError(f"ratio {ratio} must be between 0 and cap {cap}, temperature above 0")
    shares, free = [0.0] * len(rise), list(range(len(rise)))
    while free:
        room = ratio * len(rise) - cap * (len(rise) - len(free))
        least = min(rise[i] for i in free)  # else exp might underflow in all of them
        weights = {i: math.exp((least - rise[i]) / temperature) for i in free}
        total = sum(weights.values())
        full = [i for i in free if room * weights[i] / total > cap]
        for i in free:
            shares[i] = cap if i in full else max(0.0, room * weights[i] / total)
        if not full:
            break
        free = [i for i in free if i not in full]
    return shares


def smallest_rise(rise: Sequence[float], ratio: float) -> list[float]:
    """Equation 2, the paper's "01": all of the ceil(ratio * N) layers of least rise."""
    order = sorted(range(len(rise)), key=lambda i: (rise[i], i))
    chosen = set(order[: _ceil(ratio * len(rise))])
    return [float(i in chosen) for i in range(len(rise))]


def evenly_spaced(layers: int, ratio: float) -> list[float]:
    """The "01" that measures nothing: as many layers, evenly spaced, in the middle of each gap."""
    count = _ceil(ratio * layers)
    chosen = {int((i + 0.5) * layers / count) for i in range(count)}
    return [float(i in chosen) for i in range(layers)]


def _ceil(x: float) -> int:
    """Rounded up, but not for an error of the last digit: 0.2 of 30 layers are 6."""
    return math.ceil(x - 1e-9)
