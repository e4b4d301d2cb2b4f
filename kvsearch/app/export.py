"""A policy for a runtime: what becomes of each field, what that costs, and the files."""

import json
from collections.abc import Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Literal, overload

import numpy as np
from numpy.typing import NDArray

from kvsearch.app import inputs
from kvsearch.app.arguments import check_counts
from kvsearch.app.budget import check_budget
from kvsearch.app.exported import Exported, Loss
from kvsearch.app.learn import learns
from kvsearch.app.others import write_other
from kvsearch.app.policies import is_method, method
from kvsearch.app.progress import Shown
from kvsearch.app.prompts import ITEMS, PromptsResult, evaluate_prompts
from kvsearch.errors import KvsearchError, RunError, TextError
from kvsearch.evaluation.fed import require_anchors
from kvsearch.evaluation.quality import Evaluator
from kvsearch.exporters import (
    OTHERS,
    Artefact,
    Job,
    Target,
    artefact,
    find,
    project,
    proof,
    proof_of,
    verdicts,
)
from kvsearch.exporters.environments import require
from kvsearch.exporters.layers import others_of
from kvsearch.files import require_free, require_writable, write_all
from kvsearch.models.aliases import DEFAULT, hub_id
from kvsearch.models.learned import newest
from kvsearch.models.load import LoadedModel, shape_named
from kvsearch.models.shared import policy_file
from kvsearch.policy import ModelShape, Policy, check, layout
from kvsearch.policy_search.folder import run_of
from kvsearch.stats import paired
from kvsearch.text import TextLike
from kvsearch.text import windows as cut_windows
from kvsearch.workloads import See

CONTEXT = 2048  # tokens, for bytes and losses
ANY_MODEL = "MODEL"  # in artefacts, where no model was named


@overload
def export(  # type: ignore[overload-overlap]
    policy: str | PathLike[str],
    to: Literal["optuna", "vectors"],
    out: str | PathLike[str] | None = None,
    *,
    force: bool = False,
    prompt: int = 0,
) -> tuple[Path, ...]: ...


@overload
def export(
    policy: str | PathLike[str] | Policy,
    to: str = "transformers",
    out: str | PathLike[str] | None = None,
    *,
    strict: bool = False,
    force: bool = False,
    budget_slots: float | None = None,
    budget_bytes: int | None = None,
    model: str | LoadedModel | None = None,
    text: TextLike | Sequence[TextLike] | None = None,
    dataset: str | None = None,
    tasks: Sequence[str] = (),
    prompts: Sequence[str | PathLike[str]] = (),
    see: See = "agnostic",
    items: int = ITEMS,
    context: int = CONTEXT,
    windows: int = 1,
    prompt: int = 0,
    verify: bool = False,
    dtype: str = "auto",
    device: str = "auto",
    progress: bool = False,
) -> Exported: ...


def export(
    policy: str | PathLike[str] | Policy,
    to: str = "transformers",
    out: str | PathLike[str] | None = None,
    *,
    strict: bool = False,
    force: bool = False,
    budget_slots: float | None = None,
    budget_bytes: int | None = None,
    model: str | LoadedModel | None = None,
    text: TextLike | Sequence[TextLike] | None = None,
    dataset: str | None = None,
    tasks: Sequence[str] = (),
    prompts: Sequence[str | PathLike[str]] = (),
    see: See = "agnostic",
    items: int = ITEMS,
    context: int = CONTEXT,
    windows: int = 1,
    prompt: int = 0,
    verify: bool = False,
    dtype: str = "auto",
    device: str = "auto",
    progress: bool = False,
) -> Exported | tuple[Path, ...]:
    """Write what a runtime needs to run a policy, or the policy nearest to it.

    Args:
        policy: a policy file, a run folder, a policy, or the name of a method, which is sized to a
            budget.
        to: name of the target, see `kvsearch.targets`; or `vectors`, a conformance kit for a
            runtime of one's own; or `optuna`, the trials of a run folder for optuna-dashboard.
        out: folder; by default one beside the policy file.
        strict: refuse anything but an exact mapping.
        force: overwrite existing files.
        budget_slots: of a method, in fp16 slots per layer.
        budget_bytes: of a method, in bytes per sequence, instead.
        model: whose shape counts; by default that of the run that the policy file lies in.
        text: predict losses on this text.
        dataset: a named dataset instead.
        tasks, prompts, see, items: predict what answers to prompts lose instead, as
            `evaluate_prompts` does; tasks hide their facts in `text`.
        context: tokens of a window, for bytes and losses.
        windows: of the text, for losses.
        prompt: tokens that arrive in one call, for policies triggered by a prompt; not scored.
        verify: run the runtime on the text too.
        dtype, device: of the model, for losses.
        progress: print progress to stderr.

    Returns:
        What became of each field, bytes and losses; of `vectors` and `optuna` the files.

    Raises:
        KvsearchError: something that the caller can mend, in one sentence; nothing was written.
    """
    if to in OTHERS:
        if isinstance(policy, Policy):
            raise KvsearchError(f"export to {to} needs a file or folder, not a Policy object")
        return write_other(policy, to, out, force=force, prompt=prompt)
    shown, target = Shown(quiet=not progress), find(to, OTHERS)
    check_budget(budget_slots, budget_bytes)
    if not isinstance(policy, Policy) and Path(policy).is_dir():
        policy = policy_file(str(policy))
    asked: Policy | None = None  # of a method, which is sized when the model is known
    if isinstance(policy, Policy):
        asked = policy
    elif not is_method(policy):
        asked = Policy.from_json(policy)
    if asked is not None and (budget_slots is not None or budget_bytes is not None):
        raise KvsearchError("--budget sizes a named method; this policy already fixes its size")
    file = None if isinstance(policy, Policy) else Path(policy)
    folder = _folder(file, out, target)
    if verify:
        require(target)
    inputs.require_files(text)
    check_counts(windows=windows)
    prompted = bool(tasks or prompts)
    if prompted and (verify or dataset is not None):
        what = "--verify compares" if verify else "--dataset is for losses"
        raise KvsearchError(f"{what} on a text; leave --task and --prompts out")
    if context < 2:
        raise TextError(f"--context must be at least 2 tokens, got {context}")
    if not 0 <= prompt < context:
        raise TextError(
            f"--prompt {prompt} must be at least 0 and below the {context} tokens of a window; "
            "lower it or raise --context"
        )
    name, shape = _model(file, model)
    if asked is None:
        learned = None
        if shape is not None and learns(str(policy)):
            model = inputs.model(
                str(name) if not isinstance(model, LoadedModel) else model,
                dtype=dtype, device=device, context=1, say=shown.say,
            )  # fmt: skip
            learned = newest(model.model) or ""
        asked = method(
            str(policy), shape, budget_slots, budget_bytes, context=context, prompt=prompt,
            learned=learned,
        )  # fmt: skip
    loaded = None
    if prompted or verify or text is not None or dataset is not None:
        require_writable(folder / "policy.json" if folder.exists() else folder)
        loaded = inputs.model(
            name or DEFAULT if isinstance(model, str | None) else model,
            dtype=dtype, device=device, context=1 if prompted else context, say=shown.say,
        )  # fmt: skip
        name, shape = loaded.name, loaded.shape
        check(asked, shape, prompt=None if prompted else prompt)
        require_anchors(loaded, asked)
    given = project(asked, target, shape)
    found = verdicts(asked, given, None if shape is None else shape.layers)
    if strict and (lost := [f"{v.field} is {v.verdict}" for v in found if v.verdict != "exact"]):
        raise RunError(f"--strict: for {target.name} {', '.join(lost)}; nothing was written")
    made = artefact(Job(given, shape, hub_id(name or ANY_MODEL)), target)
    if not force:
        require_free(folder, made.files)
    loss: Loss | None = None
    measured: dict[str, int] = {}
    answered: PromptsResult | None = None
    if loaded is not None and prompted:
        both = [p.model_copy(update={"name": n}) for n, p in (("asked", asked), ("given", given))]
        answered = evaluate_prompts(
            both[: 1 + (asked.canonical() != given.canonical())], loaded, tasks=tasks,
            prompts=prompts, text=text, see=see, items=items, progress=progress,
        )  # fmt: skip
    elif loaded is not None:
        source = inputs.tokenized(loaded, inputs.source(text, dataset, shown.say))
        ids = cut_windows(source, count=windows, length=context)
        loss, measured = _losses(
            asked, given, target, made, loaded, ids, source.name, prompt, verify, shown
        )
    sizes = [
        None if shape is None else layout(p, shape).bytes_peak(context, prompt)
        for p in (asked, given)
    ]
    files = write_all(folder, made.files, force=force)
    for path in files:
        if path.suffix == ".sh":
            path.chmod(0o755)
    return Exported(
        target, given, proof_of(given, target, shape), found, files, context, sizes[0], sizes[1],
        loss, measured, (*target.notes, *_of_others(given, target, shape)), answered,
    )  # fmt: skip


def _of_others(given: Policy, target: Target, shape: ModelShape | None) -> list[str]:
    """What becomes of layers that no policy governs, where the runtime does not know them."""
    if target.executes is None and target.score is not None:
        return []
    if shape is None or not shape.others or not (given.drops or given.quantizes):
        return []
    return [
        f"{others_of(shape)}; no policy governs them and no byte above is theirs, but what these "
        "files set holds for them too."
    ]


def _folder(file: Path | None, out: str | PathLike[str] | None, target: Target) -> Path:
    if out is not None:
        return Path(out)
    if file is None:
        raise KvsearchError("a Policy object has no folder: give one with out, or -o DIR")
    return file.with_name(f"{file.stem}-{target.name}")


def _model(
    file: Path | None, model: str | LoadedModel | None
) -> tuple[str | None, ModelShape | None]:
    """Name and shape of the model, as far as they are known."""
    if isinstance(model, LoadedModel):
        return model.name, model.shape
    if model is not None:
        return model, shape_named(model)
    if file is None or (run := run_of(file)) is None:
        return None, None
    try:
        found = json.loads((run / "study.json").read_text(encoding="utf-8"))["model"]
        return found["name"], ModelShape(**found["shape"])
    except (OSError, ValueError, KeyError, TypeError):
        return None, None


def _losses(
    asked: Policy,
    given: Policy,
    target: Target,
    made: Artefact,
    loaded: LoadedModel,
    ids: NDArray[np.int64],
    source: str,
    prompt: int,
    verify: bool,
    shown: Shown,
) -> tuple[Loss, dict[str, int]]:
    evaluator = Evaluator(loaded)
    measured: dict[str, int] = {}
    layers, T = loaded.shape.layers, ids.shape[1]
    start = max(1, prompt, min(max(asked.slots or 1, given.slots or 1), T // 2))
    losses: dict[str, NDArray[np.float32]] = {}
    with shown.step("losses", 2 + verify) as step:
        for p in (asked, given):
            if (key := p.fingerprint(layers)) not in losses:
                nll = evaluator.quality(p, ids, prompt=prompt, resident=False).nll
                losses[key] = nll[:, start - 1 :]
            step.advance()
        a, g = losses[asked.fingerprint(layers)], losses[given.fingerprint(layers)]
        loss = Loss(source, g.size, float(a.mean()), float(g.mean()))
        if verify:
            found = proof.score(target, made, loaded, ids, prompt)
            measured = found.measured
            if found.nll is not None:
                there = found.nll[:, start - 1 :].astype(np.float32)
                loss = replace(loss, runtime=float(there.mean()), off=paired(there, g))
            step.advance()
    return loss, measured
