"""From tasks and files of prompts to the parts that a search measures policies on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsearch.config.budget import sized_for
from kvsearch.config.run_config import RunConfig
from kvsearch.errors import KvsearchError
from kvsearch.evaluation.answers import Answers, answers, greedy_of, spoken
from kvsearch.evaluation.quality import Evaluator
from kvsearch.models.disk_cache import remembered
from kvsearch.models.load import LoadedModel
from kvsearch.policy import Policy
from kvsearch.records import Example
from kvsearch.session import inputs
from kvsearch.session.progress import Shown
from kvsearch.session.self_check import self_check
from kvsearch.stats import clustered
from kvsearch.text import tokenize
from kvsearch.workloads import Material, Prompts, See, TaskSpec, make
from kvsearch.workloads.encode import encoded, items_of, start_of
from kvsearch.workloads.files import Record, read, read_all
from kvsearch.workloads.items import without_context
from kvsearch.workloads.parts import SPLITS, Part, divided, in_turn, require_names
from kvsearch.workloads.tasks.base import SHARES, Split

GATE = 0.2  # nats per token by which the context must help, at least
GATE_ITEMS = 8  # contexts on which that is tried
HEADLINE = 4  # times as many contexts of the report where its headline is undecided, at most
MORE = 8  # tokens of an example beyond the reference
LONGEST_QUESTION = 80  # tokens of a question that an example shows


def lengths(on: inputs.MeasuredOn) -> tuple[int, int]:
    """Tokens of the longest sequence, and of a prompt after which as many follow as after any."""
    parts = list(on.parts.values())
    whole = Part("all", tuple(item for part in parts for item in part.items), parts[0].see)
    return whole.longest, whole.prompt


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
        """From both measurements of the same asks."""
        gain = clustered(empty.nll - full.nll, groups(workload))
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


def own_answers(records: Sequence[Record]) -> int:
    """Asks whose reference is what the full cache answers."""
    return sum(record.answers.count(None) for record in records)


def say_own(shown: Shown, name: str, records: Sequence[Record]) -> None:
    """Say of how many asks of a file the reference is what the full cache answers, if of any."""
    if own := own_answers(records):
        of = sum(len(record.answers) for record in records)
        shown.say(f"{name}: the full cache's own answers are the references for {own} of {of}")


def from_tasks(
    loaded: LoadedModel,
    specs: Sequence[TaskSpec],
    prose: NDArray[np.int32],
    start: tuple[int, ...],
    see: See,
    count: int,
    seed: int,
    split: Split = "report",
) -> list[Prompts]:
    """Prompts of tasks, of one part; those of another part have other facts and passages.

    Args:
        loaded: the model, for its tokenizer.
        specs: the tasks.
        prose: token ids of the whole text in which facts are hidden.
        start: the tokens that begin a text.
        see: whether the question is seen before the context is compressed.
        count: items of each task; fewer where its documents are used up.
        seed: of what is drawn.
        split: the part.
    """
    low, high = (round(share * prose.size) for share in SHARES[split])
    own = prose[low:high].astype(np.int64)
    encode, greedy = partial(encoded, loaded), greedy_of(loaded)
    return [
        make(spec, Material(encode, start, own, spec.tokens, split, seed, greedy), count, see)
        for spec in specs
    ]


def records(config: RunConfig) -> dict[str, dict[Split, list[Record]]]:
    """Records of the files of prompts, by name and in disjoint parts.

    Raises:
        KvsearchError: a task or file cannot be used, or the files for the report do not fit these.
    """
    own, labels = config.report_prompts, [spec.label for spec in config.specs()]
    found: dict[str, dict[Split, list[Record]]] = {}
    for i, (name, some) in enumerate(read_all(config.prompts).items()):
        report = (read(own[i]), own[i].name) if own else ()
        found[name] = divided(name, some, *report)
    require_names([*labels, *found])
    return found


def measured_on(
    loaded: LoadedModel,
    options: RunConfig,
    files: Mapping[str, Mapping[Split, Sequence[Record]]],
    shown: Shown,
) -> inputs.MeasuredOn:
    """The parts of a search on prompts, without workloads that the model fails with every token.

    Args:
        loaded: the model.
        options: of the run.
        files: its `records`.
        shown: for progress.

    Raises:
        KvsearchError: a file or task cannot be used, or none passes its gate.
    """
    specs = options.specs()
    counts = {"search": options.items, "select": options.items}
    counts |= {"report": HEADLINE * options.items}
    parts: dict[Split, list[Prompts]] = {split: [] for split in SPLITS}
    if specs:
        given = inputs.source(options.text, options.dataset, shown.say, tasks=True)
        tokens = tokenize(loaded.tokenizer, given)
        for split in SPLITS:
            parts[split] += from_tasks(
                loaded,
                specs,
                tokens.ids,
                tokens.start,
                options.see,
                counts[split],
                options.seed,
                split,
            )
    for name, its_parts in files.items():
        say_own(shown, name, [r for some in its_parts.values() for r in some])
        for split, some in its_parts.items():
            few = some[: counts[split]]
            parts[split].append(items_of(loaded, name, few, options.see, greedy_of(loaded)))
    longest = max(w.longest for some in parts.values() for w in some)
    sized_for(loaded.shape, options.budget(loaded.shape), longest, prompts=True)
    given_to = {name: some["search"] for name, some in files.items()}
    self_check(loaded, parts["search"], given_to, shown)
    known = _passing(loaded, parts["search"], shown)
    weights = dict.fromkeys(files, 1.0) | {spec.label: float(spec.weight) for spec in specs}
    worth = {name: w.nats for name, w in known.items()}
    worths = dict.fromkeys(SPLITS, worth)
    if options.report_prompts:  # contexts of another file may be worth another loss
        own = [w for w in parts["report"] if w.name in known and w.name in files]
        worths["report"] = worth | _reported(loaded, own, shown)
    made = {
        split: in_turn(split, [w for w in some if w.name in known], worths[split], weights)
        for split, some in parts.items()
    }
    each = min(len(made["report"]), options.items * len(known))
    about: dict[str, dict[str, object]] = {k: _described(part) for k, part in made.items()}
    if options.report_prompts:
        of = {
            f.name: own.name for f, own in zip(options.prompts, options.report_prompts, strict=True)
        }
        about["report"]["name"] = ", ".join(of.get(n, n) for n in dict.fromkeys(made["report"].of))
    by_name = {("select1" if k == "select" else k): v for k, v in made.items()}
    return inputs.MeasuredOn(about, by_name, each, "select1", ())


def examples(
    loaded: LoadedModel,
    part: Part,
    policies: Mapping[str, Policy],
    count: int,
    progress: Callable[[], None],
) -> list[Example]:
    """What policies answer to the first asks of a part, with room for a few words more.

    Args:
        loaded: the model.
        part: of the report.
        policies: by name.
        count: items.
        progress: called after every answer.
    """
    evaluator, found = Evaluator(loaded), list[Example]()
    for item, name in list(zip(part.items, part.of, strict=True))[:count]:
        ask, said = item.asks[0], dict[str, str]()
        asked = ask.question if ask.question.size else item.context
        for policy_name, policy in policies.items():
            (tokens,) = spoken(evaluator, policy, item, part.see, [ask.answer.size + MORE])
            said[policy_name] = loaded.tokenizer.decode(tokens)
            progress()
        question = loaded.tokenizer.decode(asked[-LONGEST_QUESTION:])
        reference = loaded.tokenizer.decode(ask.answer)
        found.append(Example(name, question.strip(), reference.strip(), said))
    return found


def _reported(loaded: LoadedModel, workloads: Sequence[Prompts], shown: Shown) -> dict[str, float]:
    """What the contexts of files for the report are worth, in nats per token by workload."""
    found = {}
    for workload in workloads:
        worth = _gate(loaded, workload, shown)
        if not worth.passes:
            raise KvsearchError(
                f"{loaded.name} does not need the contexts that --report-prompts gives for "
                f"{workload.name} (NLL of the answers {worth.full:.2f} with them, "
                f"{worth.empty:.2f} without), so nothing can be lost there; give another file"
            )
        found[workload.name] = worth.nats
    return found


def _passing(loaded: LoadedModel, workloads: Sequence[Prompts], shown: Shown) -> dict[str, Worth]:
    """Workloads whose answers need the context, and what it is worth; the others are named."""
    found = {}
    for workload in workloads:
        worth = _gate(loaded, workload, shown)
        told = f"NLL of the answers {worth.full:.2f} with the context, {worth.empty:.2f} without"
        if worth.passes:
            shown.say(f"{workload.name}: {told}")
            found[workload.name] = worth
        else:
            shown.say(f"{workload.name} is left out: {loaded.name} does not need it ({told})")
    if not found:
        raise KvsearchError(
            f"{loaded.name} answers none of these prompts from its context with every token kept, "
            "so nothing can be lost; take other tasks, a larger model, or shorter contexts"
        )
    return found


def _gate(loaded: LoadedModel, workload: Prompts, shown: Shown) -> Worth:
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

    def read_back(data: Any) -> Worth:
        full, empty, passes = data
        if not isfinite(full + empty):
            raise ValueError("no loss")
        return Worth(float(full), float(empty), bool(passes))

    words = f"worth/{loaded.digest}/{loaded.dtype}/{workload.see}"
    return remembered("worth", words, workload.digest.encode(), read_back, measure)


def _described(part: Part) -> dict[str, Any]:
    """Names, sizes and hashes of a part, for records."""
    names = dict.fromkeys(part.of)
    return {
        "name": ", ".join(names),
        "tokens": sum(item.longest for item in part.items),
        "items": len(part),
        "asks": part.asks,
        "token_sha256": part.digest,
    }
