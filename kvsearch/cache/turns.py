"""Turns of a loop that differ in nothing but data: on a GPU they are captured once, and replayed.

A turn is some twenty small operations, each launched by the host; a replay of a CUDA graph of it is
one launch. Whether that gives the same numbers here is tried once for each device, on small ones;
KVSEARCH_GRAPHS=0 leaves graphs out.
"""

import os
import threading
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvsearch.cache.captures import NotCaptured, capture
from kvsearch_kernels.launch import on

LEAST = 24  # turns for which capturing is worth it: it takes as long as several of them
WARM = 2  # turns before, and one more with rows that are found on the device (`captures`)

_proved: dict[torch.device, bool] = {}
_asking = threading.Lock()


def repeat(turn: Callable[..., None], given: Sequence[Tensor], out: Tensor, captured: bool) -> None:
    """Call `turn` for each row of `given` `[J, ...]` and of `out` `[J, ...]`, which it writes.

    What else it reads and writes must lie where it lies from turn to turn. If it is `captured`,
    numbers that the host passes on are those of the fourth turn from then on.
    """
    first = WARM if captured else out.shape[0]
    for j in range(first):
        turn(*(x[j] for x in given), out[j])
    if captured:
        _replay(turn, given, out, first)


def _replay(
    turn: Callable[..., None], given: Sequence[Tensor], out: Tensor, first: int, trial: bool = False
) -> None:
    """`repeat` from row `first` on, by replays of one turn, which finds its row on the device.

    A turn that cannot be captured is launched by the host as before, unless this is a trial.
    """
    row = torch.full((1,), first, device=out.device)
    at, result = [torch.empty_like(x[:1]) for x in given], torch.empty_like(out[:1])

    def step() -> None:
        for place, x in zip(at, given, strict=True):
            torch.index_select(x, 0, row, out=place)
        turn(*(place[0] for place in at), result[0])
        out.index_copy_(0, row, result)
        row.add_(1)

    with on(out.device):  # whose streams are meant
        try:
            again = capture(step)
        except NotCaptured as fault:
            if trial:
                raise
            if not _lacks_memory(fault):
                _refuse(out.device, str(fault))
            again = step
        for _ in range(first + 1, out.shape[0]):
            again()


def serves(device: torch.device, count: int) -> bool:
    """Whether `count` turns are to be captured on a device; tries once whether they may be."""
    if device.type != "cuda" or count < LEAST or os.environ.get("KVSEARCH_GRAPHS") == "0":
        return False
    if torch.cuda.is_current_stream_capturing():  # captures do not nest
        return False
    with _asking:
        if device not in _proved:
            try:
                _proved[device] = same(device) or _refuse(device, "numbers differ")
            except RuntimeError as error:
                if _lacks_memory(error):
                    return False
                _refuse(device, str(error).partition("\n")[0])
    return _proved[device]


def _refuse(device: torch.device, reason: str) -> bool:
    """Capture no more turns on a device, and say why; False."""
    _proved[device] = False
    warnings.warn(f"no CUDA graphs on {device}: {reason}", RuntimeWarning, stacklevel=3)
    return False


def _lacks_memory(error: RuntimeError) -> bool:
    """Whether it may be otherwise the next time."""
    return any(isinstance(x, torch.cuda.OutOfMemoryError) for x in (error, error.__cause__))


def same(device: torch.device) -> bool:
    """Whether turns of what evictions do give the same captured and launch by launch."""
    found = []
    for captured in (False, True):
        draw, kind = torch.Generator("cpu").manual_seed(0), torch.float32
        x = torch.randn(6, 3, 4, 16, generator=draw, device="cpu", dtype=kind).to(device)
        keys = torch.randn(3, 40, 16, generator=draw, device="cpu", dtype=kind).to(device)
        sums = torch.zeros(3, 40, device=device, dtype=kind)
        out = torch.empty(6, 3, 4, 16, device=device, dtype=kind)
        seen = torch.zeros((), dtype=torch.int64, device=device)

        def turn(query: Tensor, result: Tensor, keys: Tensor = keys, sums: Tensor = sums,
                 seen: Tensor = seen) -> None:  # fmt: skip
            p = torch.softmax(query @ keys.transpose(1, 2), -1)
            torch.bmm(p, keys, out=result)
            sums.mul_(0.5).add_(p.sum(1))
            gone = (sums / (1 + seen)).topk(4, largest=False, sorted=False).indices
            keys.scatter_(1, gone.unsqueeze(-1).expand(-1, -1, 16), query)
            seen.add_(1)

        if captured:
            for j in range(WARM):
                turn(x[j], out[j])
            _replay(turn, [x], out, WARM, trial=True)
        else:
            for j in range(6):
                turn(x[j], out[j])
        found.append((out, sums, keys))
    return all(map(torch.equal, *found))
