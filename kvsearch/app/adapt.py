"""Training a model to live with its policy, or without the channels it lost: `kvsearch adapt`."""

import os
from dataclasses import asdict, replace
from os import fspath
from pathlib import Path
from typing import Any

from kvsearch.app import heads as of_heads
from kvsearch.app import inputs
from kvsearch.app.adapt_job import Job, Texts
from kvsearch.app.adapt_report import Adapted
from kvsearch.app.importance import with_importance
from kvsearch.app.policies import check_names, prunes, resolve
from kvsearch.app.progress import Shown
from kvsearch.config.budget import sized_for
from kvsearch.config.commands import AdaptConfig, PolicyLike
from kvsearch.config.function import takes
from kvsearch.errors import KvsearchError, TextError
from kvsearch.evaluation.fed import require_anchors
from kvsearch.evaluation.quality import Evaluator
from kvsearch.files import require_writable
from kvsearch.folders import require_new
from kvsearch.models.given import require_plain
from kvsearch.models.load import LoadedModel, device_named
from kvsearch.policy import Policy
from kvsearch.text import windows as cut_windows
from kvsearch.train.recipe import Recipe
from kvsearch.train.scheduled import require_schedule
from kvsearch.train.work import Work

HELD_OUT, WINDOWS = 0.1, 8  # share of the text that is not trained on, and windows of it at most


@takes(AdaptConfig)
def adapt(config: AdaptConfig) -> Adapted:
    """Train a model under a policy, and write both into a folder.

    The folder gets its name when all of it is written. Until then checkpoints are in
    `OUT.training`; the same call again goes on from the newest.

    Channels that the policy removes are taken out of the weights first, as `kvsearch prune` does.

    Returns:
        The losses on the held-out text before and after, with their paired difference.

    Raises:
        KvsearchError: something that the caller can mend, in one sentence.
    """
    shown, folder, policy = Shown(quiet=not config.progress), config.out, config.policy
    lora, rank, prompt, channels_only = (
        config.lora, config.rank, config.prompt, config.channels_only,
    )  # fmt: skip
    how = Recipe(
        lr=config.lr, warmup=config.warmup, steps=config.steps, minutes=config.minutes,
        batch=config.batch, accumulate=config.accumulate, save_every=config.save_every,
        seed=config.seed,
    )  # fmt: skip
    require_new(folder)
    check_names((policy,), sized=config.sized)
    inputs.require_files(config.text, config.held_out)
    replace(how, lora=rank if lora or (lora is None and prunes(policy)) else None).require_package()
    require_writable(folder)
    if not channels_only:
        _check_file(policy)
    if config.dtype in ("float16", "fp16"):
        raise KvsearchError("training needs --dtype float32 or bfloat16; float16 overflows")
    config.check_prompt(config.context)
    _check_device(",".join(str(device_named(x)) for x in config.device.split(",") if x != "auto"))
    loaded = inputs.model(config, context=config.context, say=shown.say)
    _check_device(loaded.devices)
    require_plain(loaded.model, "kvsearch adapt")
    if lora is None and loaded.shape.widths:
        replace(how, lora=rank).require_package()
    texts = _texts(loaded, config, shown)
    chosen = _chosen(config, loaded, texts, shown)
    if channels_only and not chosen.channels.active and not loaded.shape.widths:
        raise KvsearchError("--channels-only is for a policy, or a model, without some channels")
    if not channels_only:
        require_schedule(chosen)
    if lora is None:
        lora = chosen.channels.active or bool(loaded.shape.widths)
    how = replace(how, lora=rank if lora else None)
    how.require_package()
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


def _texts(loaded: LoadedModel, config: AdaptConfig, shown: Shown) -> Texts:
    context, count = config.context, config.windows
    tokens, held = inputs.held_out(
        loaded, config.text, config.dataset, config.held_out, HELD_OUT, shown.say
    )
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


def _chosen(config: AdaptConfig, loaded: LoadedModel, texts: Texts, shown: Shown) -> Policy:
    """The policy on this model; what a method follows is measured."""
    T, evaluator = texts.train.shape[1], Evaluator(loaded)
    setting = sized_for(loaded.shape, config.budget(loaded.shape), T, config.prompt)
    where: dict[str, Any] = dict(count=1, length=T, shown=shown)
    asked = (config.policy,)
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
