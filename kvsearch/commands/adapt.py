"""Training a model to live with its policy, or without the channels it lost: `kvsearch adapt`."""

import os
from dataclasses import asdict, replace
from os import fspath
from pathlib import Path
from typing import Any

from kvsearch.commands.adapt_job import Job, Texts
from kvsearch.commands.adapt_report import Adapted
from kvsearch.errors import KvsearchError, TextError
from kvsearch.files import require_writable
from kvsearch.folders import require_new
from kvsearch.models.in_memory import require_plain
from kvsearch.models.load import LoadedModel, device_named
from kvsearch.options.function import takes
from kvsearch.options.other_commands import AdaptConfig, PolicyLike
from kvsearch.policy import Policy
from kvsearch.session import make_windows
from kvsearch.session.policies import prunes
from kvsearch.session.progress import Shown
from kvsearch.session.session import Session
from kvsearch.train.recipe import Recipe
from kvsearch.train.scheduled import require_schedule
from kvsearch.train.work import Work
from kvsearch.workloads.text import windows as cut_windows

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
    folder, policy = config.out, config.policy
    lora, rank, prompt, channels_only = (
        config.lora, config.rank, config.prompt, config.channels_only,
    )  # fmt: skip
    how = Recipe(
        lr=config.lr, warmup=config.warmup, steps=config.steps, minutes=config.minutes,
        batch=config.batch, accumulate=config.accumulate, save_every=config.save_every,
        seed=config.seed,
    )  # fmt: skip
    require_new(folder)
    session = Session(config, policy)
    replace(how, lora=rank if lora or (lora is None and prunes(policy)) else None).require_package()
    require_writable(folder)
    if not channels_only:
        _check_file(policy)
    if config.dtype in ("float16", "fp16"):
        raise KvsearchError("training needs --dtype float32 or bfloat16; float16 overflows")
    config.check_prompt(config.context)
    _check_device(",".join(str(device_named(x)) for x in config.device.split(",") if x != "auto"))
    loaded, shown = session.load(context=config.context), session.shown
    _check_device(loaded.devices)
    require_plain(loaded.model, "kvsearch adapt")
    if lora is None and loaded.shape.widths:
        replace(how, lora=rank).require_package()
    texts = _texts(loaded, config, shown)
    setting = session.setting(config.context, config.prompt)
    setting = session.measured(setting, texts.tokens, length=config.context)
    (chosen,) = session.policies(setting)
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
    tokens, held = make_windows.held_out(
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
