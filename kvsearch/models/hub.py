"""Models on the Hugging Face hub: one snapshot folder at one revision, or one sentence."""

from collections.abc import Callable
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path

from kvsearch.errors import ModelError, nearest
from kvsearch.models.aliases import ALIASES
from kvsearch.models.read import brief
from kvsearch.models.weights import adapter, instead

# What a transformers model needs; not the same weights again in other formats.
_WANTED = ("*.json", "*.txt", "*.jinja", "*.model", "*.tiktoken")
_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")  # in order of preference
_UNWANTED = ("original/*", "onnx/*", "openvino/*", "coreml/*", "runs/*")


def snapshot(
    repo: str, announce: Callable[[str], None], refuse: Callable[[int], None]
) -> tuple[Path, str]:
    """The local folder and the revision (commit) of a hub model, downloaded where it is missing.

    Args:
        repo: `owner/name`.
        announce: called with a sentence before anything large is downloaded.
        refuse: called with the number of parameters, where the hub knows it, before the download;
            raises if this machine cannot hold them.

    Raises:
        ModelError: the model is gated or unknown, or the hub cannot be reached and the model is
            not in the local hub cache.
    """
    from huggingface_hub import HfApi, snapshot_download

    ignored = list(_UNWANTED)
    try:
        info = HfApi().model_info(repo, files_metadata=True, timeout=20)
    # The hub's client raises errors of whichever HTTP library it was built on.
    except Exception as error:
        for pattern in _WEIGHTS:
            with suppress(Exception):  # not cached, or not whole
                folder = snapshot_download(
                    repo,
                    local_files_only=True,
                    allow_patterns=[*_WANTED, pattern],
                    ignore_patterns=ignored,
                )
                if any(Path(folder).glob(pattern)):
                    return Path(folder), Path(folder).name
        raise _sentence(repo, error) from error
    if info.safetensors is not None:
        refuse(info.safetensors.total)
    sizes = {f.rfilename: f.size or 0 for f in info.siblings or []}
    found = [[n for n in sizes if fnmatch(n, p) and "/" not in n] for p in _WEIGHTS]
    weights = found[0] or found[1]
    if not weights and "adapter_config.json" in sizes:
        folder = snapshot_download(repo, allow_patterns=["adapter_config.json"])
        raise adapter(repo, Path(folder) / "adapter_config.json")
    if not weights:
        raise ModelError(
            f"{repo} on the hub has no model.safetensors or pytorch_model.bin{instead([*sizes])}"
        )
    total = sum(sizes[name] for name in weights)
    announce(f"model {repo} at {info.sha}: {total / 1e9:.1f} GB, downloaded unless it is cached")
    try:
        # By branch, not by `info.sha`: only then can a later run without network find it.
        folder = snapshot_download(
            repo, allow_patterns=[*_WANTED, *weights], ignore_patterns=ignored
        )
    except Exception as error:
        raise _sentence(repo, error) from error
    return Path(folder), Path(folder).name


def configuration_folder(repo: str) -> Path:
    """The local folder with the configuration of a hub model, downloaded where it is missing.

    Raises:
        ModelError: as `snapshot`.
    """
    from huggingface_hub import HfApi, hf_hub_download

    try:
        HfApi().model_info(repo, timeout=20)  # without network, a download would be tried for long
        return Path(hf_hub_download(repo, "config.json")).parent
    except Exception as error:  # as in `snapshot`
        with suppress(Exception):
            return Path(hf_hub_download(repo, "config.json", local_files_only=True)).parent
        raise _sentence(repo, error) from error


def _sentence(repo: str, error: Exception) -> ModelError:
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        return ModelError(
            f"{repo} is gated: accept its terms at https://huggingface.co/{repo}, then run "
            "`hf auth login` or set HF_TOKEN"
        )
    if isinstance(error, RepositoryNotFoundError | HFValidationError):
        hint = nearest(repo, {*ALIASES.values()})
        hint = hint if "did you mean" in hint else ""  # not the whole table
        return ModelError(
            f"the hub has no model {repo}, or it is private and needs `hf auth login`{hint}"
        )
    return ModelError(
        f"{repo} cannot be fetched from the hub ({brief(error)}) and is not in the local hub "
        "cache; give a local folder or a .gguf file"
    )
