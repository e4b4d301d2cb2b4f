"""The tasks that ship, by name: a further one is a file and a line here."""

from kvsearch.workloads.tasks import chains, needle, qa, recall
from kvsearch.workloads.tasks.base import Material, Task

TASKS: dict[str, Task] = {
    "needle": needle.TASK,
    "recall": recall.TASK,
    "qa": qa.TASK,
    "chains": chains.TASK,
}

__all__ = ["TASKS", "Material", "Task"]
