"""Tasks by name: a further one is a file and a line here, or an entry point of `kvsearch.tasks`."""

from typing import Any

from kvsearch.extensions import extend
from kvsearch.workloads.tasks import (
    chains,
    chat,
    instructions,
    needle,
    qa,
    recall,
    ruler_lists,
    ruler_niah,
    ruler_qa,
)
from kvsearch.workloads.tasks.base import Material, Task

TASKS: dict[str, Task] = {
    "needle": needle.TASK,
    "recall": recall.TASK,
    "qa": qa.TASK,
    "chains": chains.TASK,
    "chat": chat.TASK,
    "instructions": instructions.TASK,
    **ruler_niah.TASKS,
    **ruler_lists.TASKS,
    **ruler_qa.TASKS,
}


def _wrong(name: str, task: Any) -> str | None:
    return None if isinstance(task, Task) else "it is no Task of kvsearch.workloads.tasks"


extend(TASKS, "tasks", _wrong)

__all__ = ["TASKS", "Material", "Task"]
