"""Which tasks a model can do with every token kept: `kvsearch tasks --model M`."""

from dataclasses import dataclass

from kvsearch.errors import KvsearchError
from kvsearch.models.load import max_context
from kvsearch.options.model import ModelConfig
from kvsearch.options.other_commands import GatesConfig
from kvsearch.session import load
from kvsearch.session.context_worth import context_worth
from kvsearch.session.make_workloads import from_tasks
from kvsearch.session.progress import Shown
from kvsearch.workloads import TASKS, parse
from kvsearch.workloads.text import split, tokenize


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


def gates(config: GatesConfig) -> list[Gate]:
    """Try tasks on the contexts with which a search on them begins; see `tables.tasks`."""
    shown = Shown(quiet=not config.progress)
    config.specs()  # which raises for a task that there is not
    load.require_files(config.text)
    assert config.model is not None, "without one, tasks are listed"
    asked = ModelConfig(model=config.model, dtype=config.dtype, device=config.device)
    loaded = load.model(asked, context=1, say=shown.say)
    found = load.source(config.text, config.dataset, shown.say, tasks=True)
    prose = split(tokenize(loaded.tokenizer, found)).search
    most = max_context(loaded.model.config)

    def gate(name: str) -> Gate:
        try:
            spec = parse(name)
            (workload,) = from_tasks(loaded, [spec], prose, config.see, config.items, 0, "search")
        except KvsearchError as e:  # data that are not installed, or contexts too short for it
            return Gate(name, why=str(e))
        if most is not None and workload.longest > most:
            told = f"{workload.longest} tokens, and the model's positions reach {most}"
            return Gate(spec.label, why=told)
        worth = context_worth(loaded, workload, shown)
        return Gate(
            spec.label, len(workload.items), workload.asks, worth.full, worth.empty, worth.passes
        )

    return [gate(name) for name in config.tasks or TASKS]
