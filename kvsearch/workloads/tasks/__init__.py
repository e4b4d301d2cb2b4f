"""The tasks that ship, by name: a further one is a file and a line here."""

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

__all__ = ["TASKS", "Material", "Task"]
