"""From tasks and files of prompts, and windows of a text, to what a search measures policies on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from kvsearch.errors import KvsearchError, nearest, quoted
from kvsearch.evaluation.answers import greedy_of
from kvsearch.models.load import LoadedModel
from kvsearch.options.budget import sized_for
from kvsearch.options.run_config import RunConfig
from kvsearch.options.workload import FACTS, HEADLINE_CONTEXTS, HEADLINE_WINDOWS
from kvsearch.session.context_worth import FACTS_GATE, GATE_ITEMS, gate, reported
from kvsearch.session.context_worth import rise as rise_of
from kvsearch.session.make_windows import MeasuredOn
from kvsearch.session.progress import Shown
from kvsearch.session.self_check import self_check
from kvsearch.workloads import Material, Prompts, See, TaskSpec, make
from kvsearch.workloads.measured_parts import TEXT, Part, divided, in_turn, require_names
from kvsearch.workloads.prompts.encode import encoded, items_of, start_of
from kvsearch.workloads.prompts.files import Record, read, read_all
from kvsearch.workloads.text.windows import SPLITS, Parts, Split, Tokens


def lengths(of: "PromptSplits") -> tuple[int, int]:
    """Tokens of the longest sequence, and of a prompt after which as many follow as after any."""
    some = [workload for its in of.splits.values() for workload in its]
    whole = Prompts("all", tuple(item for w in some for item in w.items), some[0].see)
    return whole.longest, whole.prompt


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
        found = gate(loaded, workload, shown)
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
        worths["report"] = worth | reported(loaded, own, shown)
    usable = {split: [w for w in its if w.name in worth] for split, its in parts.items()}
    return PromptSplits(usable, worths, left_out)


def joined(
    loaded: LoadedModel,
    options: RunConfig,
    prompts: PromptSplits,
    text: MeasuredOn | None,
    score_from: int,
    shown: Shown,
) -> MeasuredOn:
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
        rise[TEXT] = rise_of(loaded, windows["search"], score_from, shown).nats
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
        return MeasuredOn(about, parts, each, select, (), told, prompts.left_out)
    for name, part in text.parts.items():  # further texts, in the same unit
        if name.startswith("extra"):
            scales = (1 / rise[TEXT],) * len(part)
            weighs = (1.0,) * len(part)
            parts[name] = replace(part, scales=scales, weights=weighs, score_from=score_from)
        elif name == "sensitivity":
            parts[name] = part
    for split in SPLITS:
        about[split] |= {"text": text.described[split]}
    return MeasuredOn(
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
