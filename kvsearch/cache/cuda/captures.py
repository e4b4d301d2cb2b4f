"""Recording of launches as a CUDA graph, in memory that is used again, and what if it fails.

Torch gives every capture memory of its own, which stays reserved after the graph is gone, and gives
nothing of it back while it captures: after some dozens of texts (estimated) a GPU would be full.
So the captures of a thread and stream share one pool, which a graph that is never replayed holds.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch


class NotCaptured(RuntimeError):
    """Launches were carried out once, but could not be recorded; says what failed."""


_mine = threading.local()  # `places`: by device and stream, whose order makes shared memory safe


@contextmanager
def aside() -> Iterator[Callable[[Callable[[], object]], Callable[[], None]]]:
    """Work inside goes to a stream of its own, on which the function that this gives records.

    That function takes a step and returns what repeats its launches, or raises `NotCaptured`. The
    step has to be carried out inside before, so that libraries set themselves up for that stream
    outside of the recording, where they may not.
    """
    now = torch.cuda.current_stream()
    places = _mine.__dict__.setdefault("places", {})
    key = now.device_index, now.cuda_stream
    if key not in places:
        places[key] = torch.cuda.Stream(), None
    side, _ = places[key]

    def record(step: Callable[[], object]) -> Callable[[], None]:
        try:
            if places[key][1] is None:
                places[key] = side, _holder()
            return _graph(step, places[key][1]).replay
        except RuntimeError as fault:
            places[key] = side, None
            raise NotCaptured(str(fault).partition("\n")[0]) from fault

    side.wait_stream(now)
    try:
        with torch.cuda.stream(side):
            yield record
    finally:
        now.wait_stream(side)


def _holder() -> torch.cuda.CUDAGraph:
    """A graph that does nothing of use, and whose pool lives as long as it does.

    Recorded outside of inference mode: what torch keeps for random numbers of all graphs is made
    with the first one, and other threads may write to it outside of that mode.
    """
    with torch.inference_mode(False):
        return _record(lambda: torch.zeros(1, dtype=torch.float32, device="cuda"), None)


def _graph(step: Callable[[], object], holder: torch.cuda.CUDAGraph) -> torch.cuda.CUDAGraph:
    """The recorded `step`; where memory is short, after torch has given back what it keeps."""
    try:
        return _record(step, holder)
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
    return _record(step, holder)


def _record(
    step: Callable[[], object], holder: torch.cuda.CUDAGraph | None
) -> torch.cuda.CUDAGraph:
    """Record `step` on the current stream, in the pool of `holder`.

    Raises:
        RuntimeError: what `step` raised, or else the end of the recording.
    """
    graph, fault = torch.cuda.CUDAGraph(), None
    # `torch.cuda.graph` collects garbage and empties torch's memory first: too slow for a layer
    graph.capture_begin(
        pool=None if holder is None else holder.pool(), capture_error_mode="thread_local"
    )
    try:
        step()
    except BaseException as error:
        fault = error
    try:
        graph.capture_end()
    except RuntimeError as error:
        fault = fault or error
        if holder is not None:
            _recover(holder)
    if fault is not None:
        raise fault
    return graph


def _recover(holder: torch.cuda.CUDAGraph) -> None:
    """Undo what a recording leaves behind whose end failed.

    Torch goes on to take memory from the pool, and gives back none when memory is short; and
    refuses random numbers until another recording has ended well (2.11).
    """
    device = torch.cuda.current_device()
    torch._C._cuda_endAllocateToPool(device, holder.pool())
    with suppress(RuntimeError):
        _holder()
