"""Policies that people share: a folder here, or a repository on the Hugging Face hub."""

import os
import re
from pathlib import Path

from kvsearch.errors import PolicyError
from kvsearch.policy import Policy

FILE = "policy.json"
_NAMES = (FILE, "best.json")  # of a shared policy, and of a run
_REPO = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def is_repository(name: str) -> bool:
    """Whether it can be a hub id `owner/name`."""
    return _REPO.fullmatch(name) is not None


def policy_file(name: str, revision: str | None = None) -> Path:
    """The policy file of a shared policy, downloaded where it is missing.

    Args:
        name: a policy file, a folder with one (a run folder too), or a hub id `owner/name`.
        revision: branch, tag or commit on the hub; the local hub cache serves without network.

    Raises:
        PolicyError: there is none.
    """
    path = Path(os.path.expanduser(name))  # leaves an unknown ~user as it is
    if path.is_file():
        return path
    if path.is_dir():
        for file in (path / n for n in _NAMES):
            if file.is_file():
                return file
        raise PolicyError(f"{path} holds no {' and no '.join(_NAMES)}; name a policy file")
    if not is_repository(name) or name.endswith(".json"):
        raise PolicyError(f"there is no file or folder {name}, and a hub id is owner/name")
    from huggingface_hub import hf_hub_download

    try:
        found = Path(hf_hub_download(name, FILE, revision=revision))
        rule = Policy.from_json(found).rule
        for more in rule.files if rule is not None else ():
            hf_hub_download(name, more, revision=revision)
        return found
    except PolicyError:
        raise
    # The hub's client raises errors of whichever HTTP library it was built on.
    except Exception as error:
        from kvsearch.models.read import brief  # loads torch, which a file here does not need

        raise PolicyError(
            f"{name} is no folder here, and its {FILE} cannot be fetched from the hub "
            f"({brief(error)})"
        ) from error
