"""The built-in methods, targets and tasks, as `kvsearch methods`, `targets` and `tasks` list them.

Nothing here imports torch before a model is given.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, overload

from kvsearch.errors import KvsearchError
from kvsearch.exporters import TARGETS, environments, find
from kvsearch.exporters.target import Proof
from kvsearch.options.function import takes
from kvsearch.options.other_commands import GatesConfig
from kvsearch.policy_space.methods import METHODS, Method
from kvsearch.workloads import TASKS, Task

if TYPE_CHECKING:
    from kvsearch.commands.tasks import Gate

P = ParamSpec("P")


def methods() -> dict[str, Method]:
    """The published methods, and combinations set by hand, as points of the search space.

    Returns:
        Name -> knobs that differ from the defaults, kind, one line with the paper, and whether
        runs compare with it by default.
    """
    return dict(METHODS)


@dataclass(frozen=True)
class TargetInfo:
    """A runtime that policies are exported to.

    Attributes:
        name: for `export(..., to=name)`.
        runtime, version: what the export speaks.
        proof: `nll`, `runs` or `schema`; `kvsearch.exporters.PROOFS` says what each means.
        installed: version on this machine; None if there is none.
        verify: whether `export(..., verify=True)` can run it.
        knobs: what of a policy it can execute, in words.
        notes: what no field says, one sentence each.
    """

    name: str
    runtime: str
    version: str
    proof: Proof
    installed: str | None
    verify: bool
    knobs: str
    notes: list[str]


def targets(*, install: str | None = None, progress: bool = False) -> list[TargetInfo]:
    """The runtimes that policies are exported to, and how far each export is proven.

    Args:
        install: name of a target whose runtime is installed first, in an environment of its own,
            for `verify`.
        progress: print progress to stderr.

    Returns:
        A row per runtime.

    Raises:
        KvsearchError: there is no such target, or it cannot be installed.
    """
    if install is not None:
        from kvsearch.session.progress import Shown

        environments.install(find(install), Shown(quiet=not progress).say)
    return [
        TargetInfo(
            t.name, t.runtime, t.version, t.proof, environments.installed(t), t.runs, t.knobs,
            list(t.notes),
        )
        for t in map(find, TARGETS)
    ]  # fmt: skip


class _Tasks(Protocol[P]):
    @overload
    def __call__(self) -> dict[str, Task]: ...
    @overload
    def __call__(self, *args: P.args, **options: P.kwargs) -> "list[Gate]": ...


def _typed(kind: Callable[P, GatesConfig]) -> Callable[[Callable[[GatesConfig], Any]], _Tasks[P]]:
    return takes(kind)


@_typed(GatesConfig)
def tasks(config: GatesConfig) -> "dict[str, Task] | list[Gate]":
    """The tasks that `search` and `evaluate` know; of a model, which of them it can do.

    With a model, each task is tried with the full cache: its answers must be likelier with the
    context than without, certainly and by 0.2 nats a token, or policies cannot be compared on it.

    Returns:
        Without a model, name -> task; with one, what became of each task.

    Raises:
        KvsearchError: there is no such task or option, or the model or text cannot be read.
    """
    if config.model is None:
        if config.tasks:
            raise KvsearchError("--task tries tasks on a model: give --model, too")
        return dict(TASKS)
    from kvsearch.commands.tasks import gates

    return gates(config)
