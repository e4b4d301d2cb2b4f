"""Where the evaluations of a run happen, and what evaluators in other processes load."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from kvsearch.errors import KvsearchError, ModelError
from kvsearch.evaluation.evaluator import Evaluator
from kvsearch.models.load import LoadedModel, load_model
from kvsearch.models.memory import free_memory
from kvsearch.options.executor import ExecutorConfig
from kvsearch.policy_search.executors import Executor
from kvsearch.policy_search.executors.cluster import require_ray
from kvsearch.policy_search.executors.inline import Inline
from kvsearch.policy_search.executors.spawning import can_spawn, require_main
from kvsearch.policy_search.model_worker import ModelSession, ModelWork
from kvsearch.workloads.measured_parts import Part

LONG = 1e12  # operations of a run that is worth the start of processes: half a minute of one core
MOST = 4  # processes on a CPU, unless more are asked for


def require(config: ExecutorConfig) -> None:
    """Raise a `KvsearchError` where this machine cannot have the processes asked for, or no Ray."""
    if config.on_ray:
        require_ray()
    else:
        check_workers(config.workers or 0)
        require_main(config.workers)


def check_workers(count: int) -> None:
    """Raise a `KvsearchError` for more processes than this machine can have a use for."""
    cores = os.cpu_count() or 1
    if count > (most := max(8, 4 * cores)):
        raise KvsearchError(
            f"--workers {count} are more processes than the {cores} cores of this machine can run; "
            f"give at most {most}"
        )


def work(
    loaded: LoadedModel,
    parts: Mapping[str, Part],
    *,
    batch: int | None,
    workers: int,
    ray: bool,
    device: str,
    gpus: int = 0,
) -> ModelWork:
    """What evaluators elsewhere load: the driver's model by its name and dtype.

    Args:
        loaded: the driver's own model.
        parts: windows and prompts, by name.
        batch: windows per forward pass; None: as many as fit.
        workers: how many evaluators share this machine's CPU threads; 0 if Ray decides.
        ray: Ray shows every actor its own device.
        device: as asked for, see `devices`.
        gpus: of each evaluator, see `devices`.

    Raises:
        ModelError: other processes are asked for, and no name leads to the model.
    """
    if (workers or ray) and loaded.in_memory:
        raise ModelError(
            "other processes cannot load a model that was given in memory; give its name or "
            "folder, or leave out workers, ray and engine"
        )
    if ray:
        kind = loaded.device.partition(":")[0]
        groups: tuple[str, ...] = (",".join(f"{kind}:{i}" for i in range(gpus)) or kind,)
    else:
        groups = (loaded.devices,) if loaded.device == "cpu" else devices(device, gpus)
    name = str(Path(loaded.name).resolve()) if Path(loaded.name).exists() else loaded.name
    threads = max(1, torch.get_num_threads() // (workers or 2)) if loaded.device == "cpu" else 0
    return ModelWork(name, loaded.dtype, groups, parts, batch, threads)


def processes(loaded: LoadedModel, tokens: int) -> int:
    """How many processes evaluate fastest on this machine; 0 is the driver's own.

    The threads of one evaluator wait for each other at every small operation, so on a CPU several
    evaluators with a thread or two each are faster (docs/search.md has the figures). They cost a
    start of ten seconds each, and memory for their weights where these cannot be shared.

    Args:
        loaded: the driver's own model.
        tokens: that the run will evaluate, about.
    """
    if loaded.device != "cpu" or loaded.in_memory or not can_spawn():
        return 0
    sizes = [p.numel() for p in loaded.model.parameters()]
    held = sum(p.nbytes for p in loaded.model.parameters())
    free = free_memory(torch.device("cpu"))
    room = MOST if free is None else int(free / (2 * held))
    threads = torch.get_num_threads()
    count = min(threads, MOST, max(2, threads // 2), room)
    return count if count > 1 and 2 * sum(sizes) * tokens >= LONG else 0


def first(device: str, gpus: int) -> str:
    """Where the driver's own model is: where the first evaluator would be."""
    return devices(device, gpus)[0] if gpus else device


def devices(device: str, gpus: int) -> tuple[str, ...]:
    """Where evaluators are, in turn; several devices of one have commas between them.

    Args:
        device: `auto` and `cuda` are all GPUs, `cuda:0,cuda:1` these, `cpu` and `cuda:1` itself.
        gpus: of each evaluator; 0 is one of all GPUs, and all of those that are named.

    Raises:
        ModelError: there are fewer GPUs.
    """
    every = device.split(",")
    if device in ("auto", "cuda"):
        every = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        gpus = gpus or 1
    there = sum(name.startswith("cuda") for name in every)
    if gpus and there < gpus:
        what = "torch sees" if device in ("auto", "cuda") else "--device names"
        raise ModelError(f"--gpus-per-evaluator is {gpus}, and {what} {there} CUDA devices")
    each = gpus or len(every)
    return tuple(",".join(every[i : i + each]) for i in range(0, len(every) - each + 1, each))


def executor(
    loaded: LoadedModel,
    there: ModelWork,
    *,
    workers: int,
    ray: str | None,
    gpus: int = 0,
    say: Callable[[str], None],
) -> Executor:
    """Where evaluations run: here, in `workers` processes, or on the Ray cluster at `ray`."""
    if not workers and ray is None:
        return Inline(ModelSession(Evaluator(loaded, there.batch), there.parts))
    if ray is None:
        from kvsearch.policy_search.executors.processes import Processes

        say(f"evaluating in {workers} processes on {'; '.join(there.devices)}")
        return Processes(there, workers)
    from kvsearch.policy_search.executors.ray_actors import RayActors

    actors = RayActors(there, workers, ray, max(1, gpus))
    say(f"evaluating on Ray: {actors.slots} actors")
    return actors


def park(loaded: LoadedModel, executor: Executor) -> None:
    """Drop the weights of the driver's own model while other evaluators need the memory.

    What stays on a GPU is the driver's CUDA context, a few hundred MB.
    """
    if not isinstance(executor, Inline):
        loaded.model.to("meta")
        if loaded.device != "cpu":
            torch.cuda.empty_cache()


def unpark(loaded: LoadedModel) -> LoadedModel:
    """The driver's model, loaded anew if its weights were dropped."""
    if next(loaded.model.parameters()).device.type != "meta":
        return loaded
    return load_model(
        loaded.name, dtype=loaded.dtype, device=loaded.devices, announce=lambda _: None
    )
