"""Where evaluations run."""

from functools import partial
from typing import Literal, get_args

from kvsearch.errors import KvsearchError
from kvsearch.options.checks import at_least, known
from kvsearch.options.declare import CHANGED, Config, option, part

Engine = Literal["kvsearch", "tune"]
_where = partial(option, group="Processes")


@part
class ExecutorConfig(Config):
    """Processes, or actors of Ray."""

    workers: int | None = _where(
        0,
        "evaluate in this many processes, one per GPU in turn; with --ray, actors; 0 is this "
        "process [default: on a CPU 2 to 4 for long runs, else 0; with --ray, one per GPU of the "
        "cluster, or 2]",
        check=at_least(0),
        shell=None,
        python=". That is None here, and 0 the default: a script that asks for processes needs the "
        'usual `if __name__ == "__main__":`',
    )
    gpus_per_evaluator: int = _where(
        0,
        "spread the model of each evaluator over N GPUs [default: 1, or all of --device]",
        check=at_least(0),
        metavar="N",
    )
    ray: str | None = _where(
        None,
        "evaluate in actors of a Ray cluster, or of a local Ray started for this run",
        metavar="ADDRESS|local",
    )
    engine: Engine = _where(
        "kvsearch",
        "tune runs the evaluations in Ray Tune: every policy on all windows, Tune's own tables",
        check=known("engine", get_args(Engine)),
        recorded=CHANGED,
    )

    def check(self) -> None:
        """Refuse several GPUs for each of Tune's trials."""
        super().check()
        if self.engine == "tune" and self.gpus_per_evaluator > 1:
            raise KvsearchError("--engine tune gives each trial one GPU: no --gpus-per-evaluator")

    @property
    def on_ray(self) -> bool:
        """Whether evaluations run on Ray."""
        return self.ray is not None or self.engine == "tune"
