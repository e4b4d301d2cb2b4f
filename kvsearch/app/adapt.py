"""Training a model to live with its policy, or without the channels it lost: `kvsearch adapt`."""

import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from kvsearch.app import heads as of_heads
from kvsearch.app import inputs
from kvsearch.app.adapt_job import Job, Texts
from kvsearch.app.adapt_report import Adapted
from kvsearch.app.arguments import check_counts
from kvsearch.app.budget import check_budget, in_both_units, sized_for
from kvsearch.app.importance import with_importance
from kvsearch.app.policies import PolicyLike, check_names, prunes, resolve
from kvsearch.app.progress import Shown
from kvsearch.errors import KvsearchError, TextError
from kvsearch.evaluation.fed import require_anchors
from kvsearch.evaluation.quality import Evaluator
from kvsearch.files import require_writable
from kvsearch.folders import require_new
from kvsearch.models.aliases import DEFAULT
from kvsearch.models.given import require_plain
from kvsearch.models.load import LoadedModel, device_named
from kvsearch.policy import Policy
from kvsearch.text import TextLike
from kvsearch.text import windows as cut_windows
from kvsearch.train.recipe import Recipe
from kvsearch.train.scheduled import require_schedule
from kvsearch.train.work import Work

CONTEXT = 512  # tokens of a window
HELD_OUT, WINDOWS = 0.1, 8  # share of the text that is not trained on, and windows of it at most


def adapt(
    policy: PolicyLike,
    model: str | PathLike[str] | LoadedModel = DEFAULT,
    text: TextLike | Sequence[TextLike] | None = None,
    out: str | PathLike[str] = "adapted",
    *,
    dataset: str | None = None,
    held_out: TextLike | Sequence[TextLike] | None = None,
    budget_slots: float | None = None,
    budget_bytes: int | None = None,
    context: int = CONTEXT,
    windows: int | None = None,
    prompt: int = 0,
    lora: bool | None = None,
    rank: int = 8,
    channels_only: bool = False,
    steps: int | None = None,
    minutes: float | None = None,
    batch: int = 1,
    accumulate: int = 8,
    lr: float | None = None,
    warmup: int = 20,
    save_every: int = 50,
    seed: int = 0,
    dtype: str = "auto",
    device: str = "auto",
    progress: bool = False,
) -> Adapted:
    """Train a model under a policy, and write both into a folder.

    The folder gets its name when all of it is written. Until then checkpoints are in
    `OUT.training`; the same call again goes on from the newest.

    Args:
        policy: a method, a policy file or a policy. Channels that it removes are taken out of the
            weights first, as `kvsearch prune` does.
        model: an alias, hub id, folder or `.gguf` file, or a loaded model, which stays as it is.
        text: files or texts to train on; by default the built-in one.
        out: a folder that does not exist yet.
        dataset: a named dataset, instead of a text.
        held_out: measure on these, instead of on the last tenth of the text.
        budget_slots: size a method to this many fp16 slots per layer.
        budget_bytes: size a method to this many bytes per sequence, instead.
        context: tokens of a window.
        windows: held-out windows; by default 8, or as many as there are.
        prompt: tokens of a window that arrive in one call, for policies triggered by a prompt;
            neither trained on nor scored.
        lora: train low-rank additions instead of all weights; by default where channels are gone.
        rank: of the additions.
        channels_only: train what channels leave under full attention, whatever the policy evicts.
        steps: optimizer steps; by default 200, or what the minutes allow.
        minutes: of training, at most.
        batch: windows per forward pass.
        accumulate: forward passes per step.
        lr: learning rate; by default 1e-4 with LoRA, else 2e-5.
        warmup: steps before the full rate.
        save_every: steps between checkpoints.
        seed: of the order of windows.
        dtype: of the weights written; training is on float32 weights, in bfloat16 where asked for.
        device: `auto`, `cpu` or `cuda`.
        progress: print progress to stderr.

    Returns:
        The losses on the held-out text before and after, with their paired difference.

    Raises:
        KvsearchError: something that the caller can mend, in one sentence.
    """
    shown, folder = Shown(quiet=not progress), Path(out)
    how = Recipe(
        lr=lr, warmup=warmup, steps=steps, minutes=minutes, batch=batch, accumulate=accumulate,
        save_every=save_every, seed=seed,
    )  # fmt: skip
    require_new(folder)
    check_budget(budget_slots, budget_bytes)
    check_names((policy,), sized=budget_slots is not None or budget_bytes is not None)
    inputs.require_files(text, held_out)
    check_counts(context=context, windows=windows)
    replace(how, lora=rank if lora or (lora is None and prunes(policy)) else None).check()
    require_writable(folder)
    if not channels_only:
        _check_file(policy)
    if dtype in ("float16", "fp16"):
        raise KvsearchError("training needs --dtype float32 or bfloat16; float16 overflows")
    if not 0 <= prompt < context:
        raise KvsearchError(f"--prompt {prompt} must be at least 0 and below --context {context}")
    _check_device(",".join(str(device_named(x)) for x in device.split(",") if x != "auto"))
    loaded = inputs.model(
        model,
        dtype=dtype, device=device, context=context, say=shown.say,
    )  # fmt: skip
    _check_device(loaded.devices)
    require_plain(loaded.model, "kvsearch adapt")
    if lora is None and loaded.shape.widths:
        replace(how, lora=rank).check()
    texts = _texts(loaded, text, dataset, held_out, context, windows, shown)
    chosen = _chosen(policy, loaded, texts, (budget_slots, budget_bytes), prompt, shown)
    if channels_only and not chosen.channels.active and not loaded.shape.widths:
        raise KvsearchError("--channels-only is for a policy, or a model, without some channels")
    if not channels_only:
        require_schedule(chosen)
    if lora is None:
        lora = chosen.channels.active or bool(loaded.shape.widths)
    how = replace(how, lora=rank if lora else None)
    how.check()
    work, done = Work(folder), False
    try:
        work.claim(_asked(loaded, chosen, texts, how, prompt, channels_only))
        job = Job(loaded, chosen, texts, how, prompt, channels_only, work, folder, shown)
        found = job.run()
        done = True
    finally:
        work.close(done=done or os.path.lexists(folder))  # if it was stopped after that
    return found


def _check_device(devices: str) -> None:
    """Say if training cannot be there: it takes one device, and of several GPUs the first."""
    if devices not in ("", "cpu", "cuda:0"):
        raise KvsearchError(
            f"training takes the CPU or the first GPU, not {devices}; choose a GPU with "
            "CUDA_VISIBLE_DEVICES"
        )


def _check_file(policy: PolicyLike) -> None:
    """Refuse a policy file that cannot be trained before the model is loaded."""
    if isinstance(policy, Policy):
        require_schedule(policy)
    elif Path(fspath(policy)).suffix == ".json":
        name = Path(fspath(policy)).stem
        read = Policy.from_json(policy)
        require_schedule(read.model_copy(update={"name": read.name or name}))


def _texts(
    loaded: LoadedModel,
    text: TextLike | Sequence[TextLike] | None,
    dataset: str | None,
    held_out: TextLike | Sequence[TextLike] | None,
    context: int,
    count: int | None,
    shown: Shown,
) -> Texts:
    tokens, held = inputs.held_out(loaded, text, dataset, held_out, HELD_OUT, shown.say)
    if held.token_sha256 == tokens.token_sha256:
        raise TextError("--held-out is the text that is trained on; give another one")
    span = max(1, context - len(tokens.start))
    fit = max(1, min(WINDOWS, held.ids.size // span)) if count is None else count
    return Texts(
        tokens,
        held,
        cut_windows(tokens, count=max(1, tokens.ids.size // span), length=context),
        cut_windows(held, count=fit, length=context),
    )


def _chosen(
    policy: PolicyLike,
    loaded: LoadedModel,
    texts: Texts,
    budget: tuple[float | None, int | None],
    prompt: int,
    shown: Shown,
) -> Policy:
    """The policy on this model; what a method follows is measured."""
    T, evaluator = texts.train.shape[1], Evaluator(loaded)
    setting = sized_for(loaded.shape, in_both_units(loaded.shape, *budget), T, prompt)
    where: dict[str, Any] = dict(count=1, length=T, shown=shown)
    asked = (policy,)
    setting = of_heads.for_policies(setting, asked, loaded, shown)
    setting = with_importance(setting, asked, evaluator, texts.tokens, **where)
    (chosen,) = resolve(asked, setting)
    require_anchors(loaded, chosen)
    return chosen


def _asked(
    loaded: LoadedModel, policy: Policy, texts: Texts, how: Recipe, prompt: int, only: bool
) -> dict[str, Any]:
    """What has to be the same for a training to go on; steps and minutes may be raised."""
    free = ("steps", "minutes", "save_every")
    return {
        "policy": policy.fingerprint(loaded.shape.layers),
        "model": loaded.digest,
        "dtype": loaded.dtype,
        "text": texts.tokens.token_sha256,
        "held-out text": texts.held.token_sha256,
        "--context": texts.train.shape[1],
        "--windows": len(texts.test),
        "--prompt": prompt,
        "--channels-only": only,
        **{f"--{k}": v for k, v in asdict(how).items() if k not in free},
    }
