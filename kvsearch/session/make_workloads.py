"""From tasks and files of prompts to the parts that a search measures policies on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from math import isfinite
from typing import Any

import numpy as np

from kvsearch.errors import KvsearchError, nearest, quoted
from kvsearch.evaluation.answers import Answers, answers, greedy_of, spoken
from kvsearch.evaluation.evaluator import Evaluator
from kvsearch.evaluation.part import scored
from kvsearch.models.disk_cache import remembered
from kvsearch.models.load import LoadedModel
from kvsearch.options.budget import sized_for
from kvsearch.options.run_config import RunConfig
from kvsearch.options.workload import FACTS, HEADLINE_CONTEXTS, HEADLINE_WINDOWS
from kvsearch.policy import Policy
from kvsearch.results.intervals import clustered, paired
from kvsearch.results.records import Example
from kvsearch.session import inputs
from kvsearch.session.progress import Shown
from kvsearch.session.self_check import self_check
from kvsearch.workloads import Material, Prompts, See, TaskSpec, make
from kvsearch.workloads.items import without_context
from kvsearch.workloads.measured_parts import TEXT, Part, divided, in_turn, require_names
from kvsearch.workloads.prompts.encode import encoded, items_of, start_of
from kvsearch.workloads.prompts.files import Record, read, read_all
from kvsearch.workloads.text.windows import SPLITS, Parts, Split, Tokens

GATE = 0.2  # nats per token by which the context must help, at least
GATE_ITEMS, FACTS_GATE = (
    8,
    2,
)  # contexts on which that is tried; of facts, four of which are in each
LAST, LAST_SINKS, LAST_RECENT = 16, 4, 11  # slots of a cache that has forgotten a text
MORE = 8  # tokens of an example beyond the reference
LONGEST_QUESTION = 80  # tokens of a question that an example shows


def lengths(of: "PromptSplits") -> tuple[int, int]:
    """Tokens of the longest sequence, and of a prompt after which as many follow as after any."""
    some = [workload for its in of.splits.values() for workload in its]
    whole = Prompts("all", tuple(item for w in some for item in w.items), some[0].see)
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
    prose: Tokens,
    see: See,
    count: int,
    seed: int,
    split: Split = "report",
) -> list[Prompts]:
    """Prompts of tasks, of one split; those of another have other facts and passages.

    Args:
        loaded: the model, for its tokenizer.
        specs: the tasks.
        prose: the text of the split, in which facts are hidden.
        see: whether the question is seen before the context is compressed.
        count: items of each task; fewer where its documents are used up.
        seed: of what is drawn.
        split: the split.
    """
    own, start = prose.ids.astype(np.int64), prose.start
    encode, greedy = partial(encoded, loaded), greedy_of(loaded)
    return [
        make(spec, Material(encode, start, own, spec.tokens, split, seed, greedy), count, see)
        for spec in specs
    ]


def hidden_in(loaded: LoadedModel, options: RunConfig, windows: Part, split: Split) -> Prompts:
    """The windows of a text, each a little shorter, with facts in it and questions about them."""
    (spec,) = options.specs()
    encode, start = partial(encoded, loaded), start_of(loaded)
    prose = [item.context[len(start) :] for item in windows.items]
    given = Material(
        encode, start, prose[0], spec.tokens, split, options.seed, passages=tuple(prose)
    )  # fmt: skip
    found = make(spec, given, len(prose), options.see)
    pairs = zip(windows.items, found.items, strict=True)
    return replace(found, items=tuple(replace(x, group=w.group) for w, x in pairs))


def _read(windows: Part, asked: Prompts) -> Part:
    """Windows of the text in which facts are hidden; these are not scored there."""
    pairs = zip(windows.items, asked.items, strict=True)
    items = (replace(w, context=x.context, prose=x.prose) for w, x in pairs)
    return replace(windows, items=tuple(items))


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
    _require_weighed(config, [*[TEXT] * config.windowed, *labels, *found])
    return found


@dataclass(frozen=True, eq=False)
class PromptSplits:
    """Prompts of a run, of every split.

    Attributes:
        splits: workloads of each split.
        worths: nats per token that the contexts of each are worth there, by workload.
        left_out: workloads without a use, and why.
    """

    splits: Mapping[Split, Sequence[Prompts]]
    worths: Mapping[Split, Mapping[str, float]]
    left_out: Mapping[str, str]


def asked(
    loaded: LoadedModel,
    options: RunConfig,
    files: Mapping[str, Mapping[Split, Sequence[Record]]],
    texts: Parts | None,
    shown: Shown,
) -> PromptSplits:
    """The prompts of a search, without workloads that the model fails with every token.

    Beside windows of a text nothing need be left.

    Args:
        loaded: the model.
        options: of the run.
        files: its `records`.
        texts: in which tasks hide facts.
        shown: for progress.

    Raises:
        KvsearchError: a file or task cannot be used, or none passes its gate.
    """
    counts: dict[Split, int] = dict.fromkeys(SPLITS, options.units)
    counts["report"] = HEADLINE_CONTEXTS * options.units
    if options.windowed:
        counts["report"] = HEADLINE_WINDOWS * options.report_windows
        counts["search"] = max(options.units, GATE_ITEMS)  # windows say how many are measured
    if options.facts:  # for the gate: those that are measured are hidden in the windows themselves
        counts = {"search": FACTS_GATE}
    parts: dict[Split, list[Prompts]] = {split: [] for split in SPLITS}
    left_out: dict[str, str] = {}
    for spec in options.specs():
        assert texts is not None, "tasks hide facts in a text"
        try:
            for split, count in counts.items():
                prose = getattr(texts, split)
                how = (options.see, count, options.seed, split)
                parts[split] += from_tasks(loaded, [spec], prose, *how)
        except KvsearchError:
            if not options.facts:
                raise
            left_out[spec.label] = f"a window of {options.context} tokens has no room for them"
            parts = {split: [] for split in SPLITS}
    for name, its_parts in files.items():
        say_own(shown, name, [r for some in its_parts.values() for r in some])
        for split, some in its_parts.items():
            few = some[: counts[split]]
            parts[split].append(items_of(loaded, name, few, options.see, greedy_of(loaded)))
    longest = max((w.longest for some in parts.values() for w in some), default=0)
    if not options.windowed:
        sized_for(loaded.shape, options.budget(loaded.shape), longest, prompts=True)
    if parts["search"]:
        given_to = {name: some["search"] for name, some in files.items()}
        self_check(loaded, parts["search"], given_to, shown)
    worth = dict[str, float]()
    for workload in parts["search"]:
        found = _gate(loaded, workload, shown)
        told = f"NLL of the answers {found.full:.2f} with the context, {found.empty:.2f} without"
        if found.passes:
            shown.say(f"{workload.name}: {told}")
            worth[workload.name] = found.nats
        else:
            left_out[workload.name] = f"{loaded.name} does not need it ({told})"
    for name, why in left_out.items():
        shown.say(f"{name} is left out: {why}")
    if not worth and not options.windowed:
        raise KvsearchError(
            f"{loaded.name} answers none of these prompts from its context with every token kept, "
            "so nothing can be lost; take other tasks, a larger model, or shorter contexts"
        )
    worths = dict.fromkeys(SPLITS, worth)
    if options.report_prompts:  # contexts of another file may be worth another loss
        own = [w for w in parts["report"] if w.name in worth and w.name in files]
        worths["report"] = worth | _reported(loaded, own, shown)
    usable = {split: [w for w in its if w.name in worth] for split, its in parts.items()}
    return PromptSplits(usable, worths, left_out)


def joined(
    loaded: LoadedModel,
    options: RunConfig,
    prompts: PromptSplits,
    text: inputs.MeasuredOn | None,
    score_from: int,
    shown: Shown,
) -> inputs.MeasuredOn:
    """The parts of a run on prompts, or on prompts and windows of a text in turn.

    Args:
        loaded: the model.
        options: of the run.
        prompts: at least one workload.
        text: its windows, if it has some.
        score_from: first scored position of a window.
        shown: for progress.

    Raises:
        KvsearchError: nothing is lost without the text before a window's last tokens.
    """
    weights = {spec.label: float(spec.weight) for spec in options.specs()}
    weights = {w.name: weights.get(w.name, 1.0) for w in prompts.splits["search"]}
    weights |= {TEXT: 1.0} if text is not None else {}
    weights = {name: weight * options.weighs(name) for name, weight in weights.items()}
    windows, rise = dict[Split, Part](), dict[str, float]()
    if text is not None:
        by_split = {name.rstrip("0123456789"): part for name, part in text.parts.items()}
        windows = {split: replace(by_split[split], name=TEXT) for split in SPLITS}
        if options.facts:
            asked = {split: hidden_in(loaded, options, windows[split], split) for split in SPLITS}
            windows = {split: _read(windows[split], asked[split]) for split in SPLITS}
            prompts = replace(prompts, splits={split: [its] for split, its in asked.items()})
        rise[TEXT] = _rise(loaded, windows["search"], score_from, shown).nats
    see = next(w.see for w in prompts.splits["search"])
    made = dict[Split, Part]()
    for split in SPLITS:
        mine = [windows[split]] if text is not None else []
        worth = {**prompts.worths[split], **rise}
        part = in_turn(split, [*mine, *prompts.splits[split]], worth, weights)
        made[split] = replace(part, see=see, score_from=score_from if text is not None else 1)
    each = options.report_windows if text is not None else options.items
    each = min(len(made["report"]), each * len(weights))
    about: dict[str, dict[str, object]] = {
        split: _described(made[split], {**prompts.worths[split], **rise}) for split in SPLITS
    }
    if options.report_prompts:
        of = {
            f.name: own.name for f, own in zip(options.prompts, options.report_prompts, strict=True)
        }
        about["report"]["name"] = ", ".join(of.get(n, n) for n in dict.fromkeys(made["report"].of))
    select = "select1" if text is None else f"select{len(made['select'])}"
    parts: dict[str, Part] = {(select if k == "select" else k): v for k, v in made.items()}
    if text is None:
        told = weights if options.weight else {}
        return inputs.MeasuredOn(about, parts, each, select, (), told, prompts.left_out)
    for name, part in text.parts.items():  # further texts, in the same unit
        if name.startswith("extra"):
            scales = (1 / rise[TEXT],) * len(part)
            weighs = (1.0,) * len(part)
            parts[name] = replace(part, scales=scales, weights=weighs, score_from=score_from)
        elif name == "sensitivity":
            parts[name] = part
    for split in SPLITS:
        about[split] |= {"text": text.described[split]}
    return inputs.MeasuredOn(
        about, parts, each, select, text.extra, weights=weights, left_out=prompts.left_out
    )


def _require_weighed(options: RunConfig, names: Sequence[str]) -> None:
    """Refuse weights of what there is not, and tasks or files that count nothing."""
    for given in options.weight:
        name = given.rpartition("=")[0]
        nothing = not options.weighs(name)
        if nothing and name in (TEXT, FACTS):  # which leaves them out
            continue
        if name not in names:
            raise KvsearchError(
                f"--weight {quoted(given)}: there is no workload of that name{nearest(name, names)}"
            )
        if nothing:
            raise KvsearchError(f"--weight {quoted(given)} measures nothing; leave {name} out")


def _rise(
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


def examples(
    loaded: LoadedModel,
    part: Part,
    policies: Mapping[str, Policy],
    order: Sequence[int],
    count: int,
    progress: Callable[[], None],
) -> list[Example]:
    """What policies answer to a few asks of a part, with room for a few words more.

    Asks of one context share its reading.

    Args:
        loaded: the model.
        part: of the report.
        policies: by name.
        order: numbers of the items, those first whose answers tell most.
        count: asks.
        progress: called after every answer.
    """
    evaluator, found, decode = Evaluator(loaded), list[Example](), loaded.tokenizer.decode
    for i in order:
        item, left = part.items[i], count - len(found)
        apart = takewhile(lambda ask: not ask.follows, item.asks[1:])
        asks = [*item.asks[:1], *apart][: 1 if part.see == "aware" else max(0, left)]
        tokens, said = [ask.answer.size + MORE for ask in asks], dict[str, list[str]]()
        for name, policy in policies.items() if left > 0 else ():
            said[name] = [decode(x) for x in spoken(evaluator, policy, item, part.see, tokens)]
            for _ in asks:
                progress()
        for j, ask in enumerate(asks if left > 0 else ()):
            asked = ask.question if ask.question.size else item.context
            question, reference = decode(asked[-LONGEST_QUESTION:]), decode(ask.answer)
            its = {name: words[j] for name, words in said.items()}
            found.append(Example(part.of[i], question.strip(), reference.strip(), its))
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

    words = f"worth/{loaded.digest}/{loaded.dtype}/{workload.see}"
    return remembered("worth", words, workload.digest.encode(), _worth, measure)


def _described(part: Part, worth: Mapping[str, float]) -> dict[str, Any]:
    """Names, sizes and hashes of a part, for records, and what contexts are worth in nats."""
    names = dict.fromkeys(part.of)
    return {
        "name": ", ".join(names),
        "tokens": sum(item.longest for item in part.items),
        "items": len(part),
        "asks": part.asks,
        "token_sha256": part.digest,
        "worth": dict(worth),
    }
