"""Where the evaluations of a run happen, and what evaluators in other processes load."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from kvsearch.errors import ModelError
from kvsearch.evaluate.quality import Evaluator
from kvsearch.models.load import LoadedModel
from kvsearch.search.executors import Executor
from kvsearch.search.executors.inline import Inline
from kvsearch.search.model_work import ModelSession, ModelWork


def work(
    loaded: LoadedModel,
    parts: dict[str, NDArray[np.int64]],
    *,
    batch: int,
    workers: int,
    ray: bool,
    device: str,
) -> ModelWork:
    """What evaluators elsewhere load: the driver's model by its name and dtype.

    Args:
        loaded: the driver's own model.
        parts: token windows by name.
        batch: windows per forward pass.
        workers: how many evaluators share this machine's CPU threads; 0 if Ray decides.
        ray: Ray shows every actor its own device.
        device: as asked for; `auto` and `cuda` spread processes over all GPUs.

    Raises:
        ModelError: other processes are asked for, and no name leads to the model.
    """
    if (workers or ray) and loaded.in_memory:
        raise ModelError(
            "other processes cannot load a model that was given in memory; give its name or "
            "folder, or leave out workers, ray and engine"
        )
    devices: tuple[str, ...] = (loaded.device,)
    if ray:
        devices = (loaded.device.partition(":")[0],)
    elif loaded.device != "cpu" and device in ("auto", "cuda"):
        devices = tuple(f"cuda:{i}" for i in range(torch.cuda.device_count()))
    name = str(Path(loaded.name).resolve()) if Path(loaded.name).exists() else loaded.name
    threads = max(1, torch.get_num_threads() // (workers or 2)) if loaded.device == "cpu" else 0
    return ModelWork(name, loaded.dtype, devices, parts, batch, threads)


def executor(
    loaded: LoadedModel,
    there: ModelWork,
    *,
    workers: int,
    ray: str | None,
    say: Callable[[str], None],
) -> Executor:
    """Where evaluations run: here, in `workers` processes, or on the Ray cluster at `ray`."""
    if not workers and ray is None:
        return Inline(ModelSession(Evaluator(loaded, there.batch), there.parts))
    if ray is None:
        from kvsearch.search.executors.processes import Processes

        say(f"evaluating in {workers} processes on {', '.join(there.devices)}")
        return Processes(there, workers)
    from kvsearch.search.executors.ray_actors import RayActors

    actors = RayActors(there, workers, ray)
    say(f"evaluating on Ray: {actors.slots} actors")
    return actors


def park(loaded: LoadedModel, executor: Executor) -> None:
    """Take the driver's own model off its GPU while other evaluators need its memory.

    It costs host memory for the weights and two copies of them over the bus. What stays on the GPU
    is the driver's CUDA context, a few hundred MB.
    """
    if not isinstance(executor, Inline) and loaded.device != "cpu":
        loaded.model.to("cpu")
        torch.cuda.empty_cache()


def unpark(loaded: LoadedModel) -> None:
    """Bring the driver's model back to where it was loaded."""
    loaded.model.to(loaded.device)
