"""Text to measure a model on that its policies are not evaluated on, where there is any."""

import numpy as np
from numpy.typing import NDArray

from kvsearch.text import beside, windows
from kvsearch.text.parts import Tokens

SHORT = 512  # tokens of a window, at least, where there are so many


def unscored_windows(
    tokens: Tokens, count: int, length: int, most: int, size: int
) -> tuple[NDArray[np.int64], str]:
    """Token windows `[W, T]` beside the evaluated ones, and words for where they are.

    Args:
        tokens: the text.
        count: evaluated windows.
        length: tokens of each.
        most: windows, at most.
        size: tokens of each, at most.
    """
    rest = beside(tokens, count=count, length=length)
    least = min(SHORT, length)
    if rest.ids.size >= least:
        size = min(size, rest.ids.size)
        fit = min(most, rest.ids.size // size)
        return windows(rest, count=fit, length=size), "on text beside the windows"
    where = f"on the windows themselves: the text has no other {least} tokens in a row"
    return windows(tokens, count=count, length=length)[:most, :size], where
