"""A policy for a runtime: what becomes of each field, what that costs, and the files."""

from collections.abc import Callable
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal, ParamSpec, Protocol, cast, overload

import numpy as np
from numpy.typing import NDArray

from kvsearch.commands.evaluate import evaluate
from kvsearch.commands.evaluated import EvaluateResult
from kvsearch.commands.exported import Exported, Loss
from kvsearch.commands.vectors_and_storage import write_other
from kvsearch.errors import KvsearchError, RunError
from kvsearch.evaluation.anchored_tokens import require_anchors
from kvsearch.evaluation.evaluator import Evaluator
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
from kvsearch.options.function import takes
from kvsearch.options.model import ModelConfig
from kvsearch.options.other_commands import ExportConfig
from kvsearch.policy import ModelShape, Policy, check, layout
from kvsearch.results.folder import run_of
from kvsearch.results.intervals import paired
from kvsearch.results.study import Study
from kvsearch.serving.account import waits
from kvsearch.session import load
from kvsearch.session.learned import learns
from kvsearch.session.policies import is_method, method
from kvsearch.session.progress import Shown
from kvsearch.workloads.text import windows as cut_windows

ANY_MODEL = "MODEL"  # in artefacts, where no model was named
P = ParamSpec("P")


class _Export(Protocol[P]):
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, policy: str | PathLike[str], to: Literal["optuna", "vectors"],
        out: str | PathLike[str] | None = None, *, force: bool = False, prompt: int = 0,
    ) -> tuple[Path, ...]: ...  # fmt: skip
    @overload
    def __call__(self, *args: P.args, **options: P.kwargs) -> Exported: ...


def _typed(
    kind: Callable[P, ExportConfig],
) -> Callable[[Callable[[ExportConfig], Any]], _Export[P]]:
    return cast(Any, takes(kind))


@_typed(ExportConfig)
def export(config: ExportConfig) -> Exported | tuple[Path, ...]:
    """Write what a runtime needs to run a policy, or the policy nearest to it.

    The policy may also be a run folder, whose recommended one it is then.

    Returns:
        What became of each field, bytes and losses; of `vectors` and `optuna` the files.

    Raises:
        KvsearchError: something that the caller can mend, in one sentence; nothing was written.
    """
    policy, to, prompt, context = config.policy, config.to, config.prompt, config.context
    text, dataset, verify = config.text, config.dataset, config.verify
    if to in OTHERS:
        if isinstance(policy, Policy):
            raise KvsearchError(f"export to {to} needs a file or folder, not a Policy object")
        return write_other(policy, to, config.out, force=config.force, prompt=prompt)
    shown, target = Shown(quiet=not config.progress), find(to, OTHERS)
    if not isinstance(policy, Policy) and Path(policy).is_dir():
        policy = policy_file(str(policy))
    asked: Policy | None = None  # of a method, which is sized when the model is known
    if isinstance(policy, Policy):
        asked = policy
    elif not is_method(policy):
        asked = Policy.from_json(policy)
    if asked is not None and config.sized:
        raise KvsearchError("--budget sizes a named method; this policy already fixes its size")
    file = None if isinstance(policy, Policy) else Path(policy)
    folder = _folder(file, config.out, target)
    if verify:
        _require_provable(asked, target)
        require(target)
    load.require_files(text)
    asks = config.names_prompts
    if asks and (verify or dataset is not None):
        what = "--verify compares" if verify else "--dataset is for losses"
        raise KvsearchError(f"{what} on a text; leave --task and --prompts out")
    config.check_prompt(context)
    name, shape = _model(file, config.model)
    own = name or DEFAULT if isinstance(config.model, str | None) else config.model
    model = ModelConfig(model=own, dtype=config.dtype, device=config.device)
    if asked is None:
        learned = None
        if shape is not None and learns(str(policy)):
            there = load.model(model, context=1, say=shown.say)
            learned, model = newest(there.model) or "", ModelConfig(model=there)
        asked = method(str(policy), shape, config, context=context, prompt=prompt, learned=learned)
    if verify:
        _require_provable(asked, target)
    loaded = None
    if asks or verify or text or dataset is not None:
        require_writable(folder / "policy.json" if folder.exists() else folder)
        loaded = load.model(model, context=context if config.windowed else 1, say=shown.say)
        name, shape = loaded.name, loaded.shape
        check(asked, shape, prompt=prompt if config.windowed else None)
        require_anchors(loaded, asked)
    given = project(asked, target, shape)
    found = verdicts(asked, given, None if shape is None else shape.layers)
    lost = [f"{v.field} is {v.verdict}" for v in found if v.verdict != "exact"]
    if config.strict and lost:
        raise RunError(f"--strict: for {target.name} {', '.join(lost)}; nothing was written")
    made = artefact(Job(given, shape, hub_id(name or ANY_MODEL)), target)
    if not config.force:
        require_free(folder, made.files)
    loss: Loss | None = None
    measured: dict[str, int] = {}
    answered: EvaluateResult | None = None
    if loaded is not None and asks:
        both = [p.model_copy(update={"name": n}) for n, p in (("asked", asked), ("given", given))]
        answered = evaluate(
            both[: 1 + (asked.canonical() != given.canonical())], loaded, text,
            tasks=config.tasks, prompts=config.prompts, see=config.see, items=config.items,
            context=context if text else None, windows=config.windows if text else None,
            prompt=prompt if text else 0, progress=config.progress,
            score_from=_scored_from(asked, given, prompt, context) if text else None,
        )  # fmt: skip
    elif loaded is not None:
        source = load.tokenized(loaded, load.source(text, dataset, shown.say))
        ids = cut_windows(source, count=config.windows, length=context)
        loss, measured = _losses(
            asked, given, target, made, loaded, ids, source.name, prompt, verify, shown
        )
    sizes = [
        None if shape is None else layout(p, shape).bytes_peak(context, prompt)
        for p in (asked, given)
    ]
    files = write_all(folder, made.files, force=config.force)
    for path in files:
        if path.suffix == ".sh":
            path.chmod(0o755)
    return Exported(
        target, given, proof_of(given, target, shape), found, files, context, sizes[0], sizes[1],
        loss, measured, (*target.notes, *made.notes, *_of_others(given, target, shape)), answered,
    )  # fmt: skip


def _require_provable(asked: Policy | None, target: Target) -> None:
    """Refuse to verify what the runtime's losses cannot show; of a method this is known later."""
    if target.prompts_only and asked is not None and waits(asked):
        raise KvsearchError(
            f"--verify compares losses of a prompt, which {target.name} tells, and this policy "
            "changes nothing before a prompt ends; serve it, and run `kvsearch verify POLICY "
            "--server URL --text FILE`"
        )


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


def _folder(file: Path | None, out: Path | None, target: Target) -> Path:
    if out is not None:
        return out
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
        study = Study.read(run / "study.json")
    except RunError:  # of another version
        return None, None
    return study.model.name, study.shape


def _scored_from(asked: Policy, given: Policy, prompt: int, tokens: int) -> int:
    """Where the larger cache is full, or the middle of a window if that comes first."""
    return max(1, prompt, min(max(asked.slots or 1, given.slots or 1), tokens // 2))


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
    start = _scored_from(asked, given, prompt, T)
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
