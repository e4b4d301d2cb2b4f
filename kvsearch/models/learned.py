"""Weights that a rule has learned for a model: where they lie, and whether they are of this model.

A policy names them by their SHA-256. The file lies beside the policy file, or in the disk cache,
where `kvsearch adapt` keeps a copy: so a policy that reaches another process as text finds it, too.
"""

import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from kvsearch.errors import PolicyError, RunError
from kvsearch.files import write_atomic
from kvsearch.models.disk_cache import cache_folder
from kvsearch.models.in_memory import require_plain
from kvsearch.models.projections import projections
from kvsearch.policy import Policy
from kvsearch.rules import KVzap
from kvsearch.rules.kvzap import file_of

SCHEMA = "kvsearch.kvzap/1"
SAMPLE = 16  # weights of every layer that tell one model from another
ALIKE = 0.9  # share of them that is equal in one model, whatever types it was rounded to before
TRAIN = "kvsearch adapt --rule kvzap --model MODEL --text FILE --out DIR"


@dataclass(frozen=True, eq=False)
class Learned:
    """A linear map per layer, from the input of its attention to a score per KV head.

    Attributes:
        weight: `[L, H, hidden]` fp32.
        bias: `[L, H]` fp32.
        sample: of the model's key projections `[L, SAMPLE]` fp32.
        name: of the model.
    """

    weight: Tensor
    bias: Tensor
    sample: Tensor
    name: str

    def encoded(self) -> bytes:
        """The file."""
        tensors = {"weight": self.weight, "bias": self.bias, "sample": self.sample}
        about = {SCHEMA: self.name}  # of one entry, whose order is always the same
        held = {k: x.float().contiguous().cpu() for k, x in tensors.items()}
        return safetensors.torch.save(held, about)


def sample_of(model: Any, what: str = "rule 'kvzap'") -> Tensor:
    """Some weights of every layer `[L, SAMPLE]` fp32, rounded to bfloat16, as every dtype has them.

    Raises:
        ModelError: the model has fused or quantised projections, or adapters.
    """
    require_plain(model, what)
    keys = [p.k.weight.detach() for p in projections(model, f"{what} needs")]
    rows = [x.diagonal()[:SAMPLE].to("cpu", torch.bfloat16).float() for x in keys]
    return torch.stack([torch.nn.functional.pad(x, (0, SAMPLE - len(x))) for x in rows])


def keep(data: bytes, model: Any) -> str:
    """Keep a file in the disk cache, as the newest of the model; returns its SHA-256.

    A cache that cannot be written is passed over: the file beside the policy serves.
    """
    sha256 = hashlib.sha256(data).hexdigest()
    with suppress(RunError):
        write_atomic(_folder() / file_of(sha256), data)
        write_atomic(_newest(model), sha256)
    return sha256


def newest(model: Any) -> str | None:
    """SHA-256 of the weights that were last trained on this machine for the model, if any were."""
    with suppress(OSError):
        sha256 = _newest(model).read_text(encoding="ascii")
        if (_folder() / file_of(sha256)).is_file():
            return sha256
    return None


def beside(policy: Policy) -> dict[str, bytes]:
    """Files that a policy needs beside its own, by name.

    Raises:
        PolicyError: they are missing or damaged, or the policy does not say which they are.
    """
    rule = policy.rule
    if not isinstance(rule, KVzap):
        return {}
    if rule.weights is None:
        raise PolicyError(
            "the policy names no weights of rule 'kvzap' that could go along with it; train them "
            f"with {TRAIN}, and take the policy in DIR"
        )
    return {file_of(rule.weights): _bytes(rule.weights)}


def learned(rule: KVzap, model: Any) -> Learned:
    """The weights of a rule, for a model.

    Raises:
        PolicyError: they are missing, damaged or of another model.
        ModelError: the model has fused or quantised projections, or adapters.
    """
    sha256, mine = rule.weights or newest(model), sample_of(model)
    if sha256 is None:
        raise PolicyError(f"rule 'kvzap' has no weights for this model; train them with {TRAIN}")
    found = _read(_bytes(sha256), file_of(sha256))
    hidden = projections(model)[0].k.in_features
    heads, ours = found.weight.shape[1], mine.shape
    same = found.sample.shape == ours and found.weight.shape[2] == hidden
    if not same or (found.sample == mine).float().mean() < ALIKE:
        raise PolicyError(
            f"{file_of(sha256)} was trained for {found.name}, with {len(found.sample)} layers of "
            f"{heads} KV heads and other weights than this model; train others with {TRAIN}"
        )
    return found


def _folder() -> Path:
    return cache_folder() / "kvzap"


def _newest(model: Any) -> Path:
    """Names the newest weights of a model."""
    found = hashlib.sha256(sample_of(model).numpy().tobytes()).hexdigest()
    return _folder() / f"{found[:16]}.txt"


def _bytes(sha256: str) -> bytes:
    """A file with this hash."""
    name, wrong = file_of(sha256), None
    for folder in (KVzap.folders.get(sha256), _folder()):
        if folder is None:
            continue
        try:
            data = (folder / name).read_bytes()
        except OSError:
            continue
        if hashlib.sha256(data).hexdigest() == sha256:
            return data
        wrong = folder / name
    if wrong is not None:
        raise PolicyError(
            f"{wrong} is not the file that the policy was made with (its SHA-256 is not "
            f"{sha256[:16]}...); restore it, or train weights with {TRAIN}"
        )
    where = KVzap.folders.get(sha256)
    place = f"beside the policy, in {where}" if where is not None else f"in {_folder()}"
    raise PolicyError(
        f"the weights of rule 'kvzap' are missing: {name} is to lie {place}; restore it, or train "
        f"weights with {TRAIN}"
    )


def _read(data: bytes, file: str) -> Learned:
    """Raises a `PolicyError` for a file of another kind; what is read has the right hash."""
    try:
        held, name = safetensors.torch.load(data), _about(data)[SCHEMA]
        return Learned(held["weight"], held["bias"], held["sample"], name)
    except (SafetensorError, KeyError, ValueError) as e:
        raise PolicyError(f"{file} holds no weights of {SCHEMA}; train some with {TRAIN}") from e


def _about(data: bytes) -> dict[str, str]:
    """Metadata of a safetensors file."""
    size = int.from_bytes(data[:8], "little")
    found: dict[str, str] = json.loads(data[8 : 8 + size]).get("__metadata__", {})
    return found
