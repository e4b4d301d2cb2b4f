"""Which tasks a model can do with every token kept: `kvsearch tasks --model M`."""

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike

from kvsearch.app import inputs
from kvsearch.app.arguments import check_counts, several
from kvsearch.app.progress import Shown
from kvsearch.app.workloads import context_worth, from_tasks
from kvsearch.errors import KvsearchError
from kvsearch.models.load import LoadedModel, max_context
from kvsearch.text import TextLike, tokenize
from kvsearch.workloads import TASKS, See, expanded, parse


@dataclass(frozen=True)
class Gate:
    """Whether policies can be compared on a task with this model.

    Attributes:
        task: its name with its options.
        items, asks: contexts and questions that were tried.
        full, empty: NLL of the answers, nats per token, with the full cache and without the
            context; None where the task was not tried.
        passes: whether the context certainly helps, and enough.
        why: the task was not tried, in a sentence; else None.
    """

    task: str
    items: int = 0
    asks: int = 0
    full: float | None = None
    empty: float | None = None
    passes: bool = False
    why: str | None = None


def gates(
    model: str | PathLike[str] | LoadedModel,
    tasks: str | Sequence[str],
    text: TextLike | Sequence[TextLike] | None,
    dataset: str | None,
    see: See,
    items: int,
    dtype: str,
    device: str,
    progress: bool,
) -> list[Gate]:
    """Try tasks on the contexts with which a search on them begins; see `tables.tasks`."""
    shown = Shown(quiet=not progress)
    check_counts(items=items)
    asked = expanded(several(tasks))
    for spec in asked:
        parse(spec)
    inputs.require_files(text)
    loaded = inputs.model(
        model,
        dtype=dtype, device=device, context=1, say=shown.say,
    )  # fmt: skip
    prose = tokenize(loaded.tokenizer, inputs.source(text, dataset, shown.say, tasks=True))
    most = max_context(loaded.model.config)

    def gate(name: str) -> Gate:
        try:
            spec = parse(name)
            (workload,) = from_tasks(
                loaded, [spec], prose.ids, prose.start, see, items, 0, "search"
            )
        except KvsearchError as e:  # data that are not installed, or contexts too short for it
            return Gate(name, why=str(e))
        if most is not None and workload.longest > most:
            told = f"{workload.longest} tokens, and the model's positions reach {most}"
            return Gate(spec.label, why=told)
        worth = context_worth(loaded, workload, shown)
        return Gate(
            spec.label, len(workload.items), workload.asks, worth.full, worth.empty, worth.passes
        )

    return [gate(name) for name in asked or TASKS]
