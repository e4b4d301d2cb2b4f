"""What a context is worth to a model: how much better it answers, or goes on, with it."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from kvsearch.errors import KvsearchError
from kvsearch.evaluation.answers import Answers, answers
from kvsearch.evaluation.evaluator import Evaluator
from kvsearch.evaluation.part import scored
from kvsearch.models.disk_cache import remembered
from kvsearch.models.load import LoadedModel
from kvsearch.options.workload import FACTS
from kvsearch.policy import Policy
from kvsearch.results.intervals import clustered, paired
from kvsearch.session.progress import Shown
from kvsearch.workloads import Prompts
from kvsearch.workloads.items import without_context
from kvsearch.workloads.measured_parts import Part
from kvsearch.workloads.prompts.encode import start_of

GATE = 0.2  # nats per token by which the context must help, at least


GATE_ITEMS, FACTS_GATE = (
    8,
    2,
)  # contexts on which that is tried; of facts, four of which are in each


LAST, LAST_SINKS, LAST_RECENT = 16, 4, 11  # slots of a cache that has forgotten a text


@dataclass(frozen=True)
class Worth:
    """What the context of a workload is worth to a model.

    Attributes:
        full, empty: NLL of the answers, nats per token, with the full cache, and without the
            context.
        passes: whether the context certainly helps, by `GATE` at least.
    """

    full: float
    empty: float
    passes: bool

    @property
    def nats(self) -> float:
        """By which the context lowers the NLL of the answers."""
        return self.empty - self.full

    @classmethod
    def of(cls, workload: Prompts, full: Answers, empty: Answers) -> "Worth":
        """From both measurements of the same asks.

        Facts are drawn one by one, so each counts as independent: few contexts are enough.
        """
        facts = [str(i) for i in range(len(full.nll))]
        documents = facts if workload.name == FACTS else groups(workload)
        gain = clustered(empty.nll - full.nll, documents)
        passes = gain.mean >= GATE and not gain.lo <= 0
        return cls(float(full.nll.mean()), float(empty.nll.mean()), passes)


def groups(workload: Prompts) -> list[str]:
    """The document of every ask, which statistics count as independent."""
    return [item.group for item in workload.items for _ in item.asks]


def bare(workload: Prompts, loaded: LoadedModel) -> Prompts:
    """The same asks without their contexts: what can be guessed."""
    start = start_of(loaded)
    items = tuple(without_context(item, start) for item in workload.items)
    return Prompts(workload.name, items, "aware")


def rise(
    loaded: LoadedModel,
    windows: Part,
    score_from: int,
    shown: Shown,
) -> Worth:
    """What the tokens before the last few are worth to the model, in nats per scored token.

    Args:
        loaded: the model.
        windows: of the search text.
        score_from: first scored position.
        shown: for progress.

    Raises:
        KvsearchError: they are worth nothing.
    """
    window = windows.items[0]
    few = window.context[None]

    def measure() -> list[Any]:
        evaluator, found = Evaluator(loaded), list[Any]()
        last = Policy(name="last tokens", slots=LAST, sinks=LAST_SINKS, recent_window=LAST_RECENT)
        with shown.step("text: worth of what came before", 2) as step:
            for policy in (Policy(name="full"), last):
                nll = evaluator.quality(policy, few, resident=False).nll[0]
                found.append(scored(nll, window, score_from)[None])
                step.advance()
        gap = paired(found[1], found[0])
        return [float(found[0].mean()), float(found[1].mean()), gap.mean >= GATE and gap.lo > 0]

    words = f"rise/{loaded.digest}/{loaded.dtype}/{score_from}/{LAST}"
    worth = remembered("worth", words, few.astype("<i4").tobytes(), _worth, measure)
    told = (
        f"NLL {worth.full:.2f} with all of a window, {worth.empty:.2f} with its last {LAST} tokens"
    )
    shown.say(f"text: {told}")
    if not worth.passes:
        raise KvsearchError(
            f"{loaded.name} predicts this text as well from a window's last tokens ({told}), so "
            "nothing can be lost there; give another text, or leave it out with --weight text=0"
        )
    return worth


def _worth(data: Any) -> Worth:
    full, empty, passes = data
    if not isfinite(full + empty):
        raise ValueError("no loss")
    return Worth(float(full), float(empty), bool(passes))


def reported(loaded: LoadedModel, workloads: Sequence[Prompts], shown: Shown) -> dict[str, float]:
    """What the contexts of files for the report are worth, in nats per token by workload."""
    found = {}
    for workload in workloads:
        worth = gate(loaded, workload, shown)
        if not worth.passes:
            raise KvsearchError(
                f"{loaded.name} does not need the contexts that --report-prompts gives for "
                f"{workload.name} (NLL of the answers {worth.full:.2f} with them, "
                f"{worth.empty:.2f} without), so nothing can be lost there; give another file"
            )
        found[workload.name] = worth.nats
    return found


def gate(loaded: LoadedModel, workload: Prompts, shown: Shown) -> Worth:
    """What the first contexts of a workload are worth: whether the model can use them at all."""
    few = Prompts(workload.name, workload.items[:GATE_ITEMS], workload.see)
    return context_worth(loaded, few, shown)


def context_worth(loaded: LoadedModel, workload: Prompts, shown: Shown) -> Worth:
    """What the contexts of a workload are worth, measured once and kept on disk."""

    def measure() -> list[Any]:
        evaluator = Evaluator(loaded)
        with shown.step(f"{workload.name}: full cache", 2 * len(workload.items)) as step:
            found = [
                answers(evaluator, Policy(), some, resident=False, progress=step.advance)
                for some in (workload, bare(workload, loaded))
            ]
        worth = Worth.of(workload, *found)
        return [worth.full, worth.empty, worth.passes]

    words = f"worth/{loaded.digest}/{loaded.dtype}/{workload.see}"
    return remembered("worth", words, workload.digest.encode(), _worth, measure)
