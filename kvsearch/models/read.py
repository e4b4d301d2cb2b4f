"""Model and tokenizer out of a local folder, quietly, or one sentence that says why not."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as hf_logging

from kvsearch.errors import ModelError
from kvsearch.models import pruned
from kvsearch.models.gguf_header import read_header
from kvsearch.models.gguf_rope import scaled, scales


def read(folder: Path, dtype: torch.dtype, *, gguf: str | None = None) -> tuple[Any, Any]:
    """Model and tokenizer of a folder, or of one GGUF file in it, on the CPU.

    Raises:
        ModelError: transformers cannot load it, or some weights are absent from the files.
    """
    extra: dict[str, Any] = {"gguf_file": gguf} if gguf else {}
    place = folder / gguf if gguf else folder
    # The GGUF reader's progress bar cannot be switched off; it writes to the present stderr.
    know_pruned()
    muted = redirect_stderr(StringIO()) if gguf else nullcontext()
    try:
        with quiet(), muted:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, **extra)
            if gguf and scales(header := read_header(place)):
                extra["config"] = scaled(configuration(folder, gguf=gguf), header)
            model, info = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, with a name
                **extra,
            )
    except ModelError:
        raise
    # Whatever transformers raises here is about the files: bad JSON, unknown architecture,
    # missing tokenizer, mismatched shapes, a package that a quantised format needs.
    except Exception as error:
        raise ModelError(f"transformers cannot load {place}: {brief(error)}") from error
    if lost := sorted(info["missing_keys"]):
        # transformers fills missing weights with random numbers and only warns.
        raise ModelError(f"{place} lacks {len(lost)} weights of its model, such as {lost[0]!r}")
    if wrong := sorted(info["mismatched_keys"]):
        key, found, wanted = wrong[0]
        raise ModelError(
            f"{place} has {len(wrong)} weights of another shape than its config says, such as "
            f"{key!r}: {list(found)} instead of {list(wanted)}"
        )
    return model, tokenizer


def tokenizer_in(folder: Path) -> Any:
    """The tokenizer in a model folder, without the weights.

    Raises:
        ModelError: transformers cannot load it.
    """
    know_pruned()
    try:
        with quiet():
            return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # as in `read`
        raise ModelError(f"transformers cannot load {folder}: {brief(error)}") from error


def know_pruned() -> None:
    """Let transformers load what `kvsearch prune` writes without running the code beside it."""
    for config, model in (
        (pruned.PrunedConfig, pruned.PrunedForCausalLM),
        (pruned.DeciLMConfig, pruned.DeciLMForCausalLM),
    ):
        AutoConfig.register(config.model_type, config, exist_ok=True)
        AutoModelForCausalLM.register(config, model, exist_ok=True)


def configuration(folder: Path, *, gguf: str | None = None) -> Any:
    """The configuration in a model folder, or of one GGUF file in it, without the weights.

    Raises:
        ModelError: transformers cannot read it.
    """
    know_pruned()
    try:
        with quiet():
            extra = {"gguf_file": gguf} if gguf else {}
            return AutoConfig.from_pretrained(folder, local_files_only=True, **extra)
    except Exception as error:  # as in `read`
        raise ModelError(f"transformers cannot load {folder}: {brief(error)}") from error


def parameters_of(config: Any) -> int:
    """How many a model of this configuration has; none are made.

    Raises:
        ModelError: transformers has no such model.
    """
    try:
        with quiet(), torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # as in `read`
        raise ModelError(f"transformers cannot build this model: {brief(error)}") from error
    return sum(p.numel() for p in model.parameters())


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers; what the user had set comes back afterwards, also after an error."""
    level, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity(hf_logging.CRITICAL)
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()


def brief(error: Any) -> str:
    """First line of a library's error, short enough for a sentence; with what a colon promises."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    if text.endswith(":") and len(lines) > 1:
        text = f"{text} {lines[1]}"
    return text if len(text) <= 240 else text[:237] + "..."


@contextmanager
def muted() -> Iterator[None]:
    """No warnings and no log lines inside; what was set before comes back afterwards."""
    before = logging.root.manager.disable
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(before)
