"""How glibc's allocator treats memory that evaluations free."""

import ctypes

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # numbers of `mallopt`, in glibc's malloc.h
KEPT = 1 << 30  # bytes that stay with the process at most


def keep_freed() -> bool:
    """Let this process keep what it frees, up to `KEPT` bytes, for its next allocations.

    A forward pass on a CPU frees tensors of megabytes all the time. By default each is mapped anew,
    and the kernel clears every page of it at first use: a tenth of an evaluation
    (`studies/2026-11-evaluation-cost`). For processes that do nothing but evaluate. What was
    allocated before, such as weights, is given back as ever.

    Returns:
        Whether the allocator took it; False where it is not glibc's.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # not there, or Windows
        return False
    return bool(mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, KEPT))
