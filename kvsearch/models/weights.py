"""Weight files before they are loaded: which ones, how many parameters, and their digest."""

import hashlib
import json
import math
import re
from collections.abc import Sequence
from io import BufferedReader
from pathlib import Path
from zipfile import is_zipfile

import torch

from kvsearch.errors import ModelError
from kvsearch.models.gguf_header import read_header

WHOLE = 4 << 30  # bytes up to which a digest reads everything: 6 s at 0.6 GB/s
_SHARD = re.compile(r"-\d+-of-\d+\.")
_BLOCKS, _BLOCK = 256, 64 << 10


def weight_files(folder: Path) -> list[Path]:
    """The files that transformers will read in a model folder.

    Raises:
        ModelError: there are none, or one that the index names is missing.
    """
    for stem, end in (("model", "safetensors"), ("pytorch_model", "bin")):
        single, index = folder / f"{stem}.{end}", folder / f"{stem}.{end}.index.json"
        if single.is_file():
            return [single]
        if index.is_file():
            try:
                words = json.loads(index.read_text("utf-8"))
                names = sorted(set(words["weight_map"].values()))
                files = [folder / name for name in names]
            except (ValueError, KeyError, AttributeError, TypeError) as error:
                raise ModelError(f"{index} is damaged; fetch the model again") from error
            if lost := [file.name for file in files if not file.is_file()]:
                raise ModelError(f"{folder} lacks {', '.join(lost)}; fetch the model again")
            return files
    names = [str(x.relative_to(folder)) for x in sorted(folder.glob("*")) if x.is_file()]
    below = sorted(x.parent.name for x in folder.glob("*/config.json"))
    raise ModelError(
        f"{folder} has no model.safetensors or pytorch_model.bin{instead(names, below)}"
    )


def instead(names: Sequence[str], folders: Sequence[str] = ()) -> str:
    """The end of a sentence on a place without weights of the usual name: what it has.

    Args:
        names: of its files.
        folders: in it that hold a model.
    """
    ggufs = [name for name in names if name.lower().endswith(".gguf")]
    if len(ggufs) == 1:
        return f"; it has a GGUF file: give the path of {ggufs[0]}"
    if ggufs:
        return f"; it has GGUF files: give the path of one of {', '.join(ggufs)}"
    own = ("consolidated", "adapter_model", "optimizer", "training_args")
    other = [n for n in names if n.endswith((".safetensors", ".bin")) and not n.startswith(own)]
    if any(_SHARD.search(name) for name in other):
        return (
            f"; it has {other[0]}, a part of several, and lacks the index that names them "
            "(model.safetensors.index.json): fetch the model again"
        )
    if other:
        return (
            f"; it has {', '.join(other)}, as of a variant, and transformers looks for "
            "model.safetensors: load it with that variant and save it without (save_pretrained)"
        )
    if any(name.startswith("consolidated") for name in names):
        return (
            "; it has consolidated weights, which transformers does not read: fetch the model in "
            "its format, or convert it"
        )
    return f"; give the folder {folders[0]} in it, which holds a model" if folders else ""


def adapter(place: str, config: Path) -> ModelError:
    """The sentence on a place that holds an adapter of PEFT and no model.

    Args:
        place: a folder, or an id on the hub.
        config: its adapter_config.json.
    """
    try:
        words = json.loads(config.read_text("utf-8"))
        base, kind = str(words.get("base_model_name_or_path") or ""), words.get("peft_type")
    except (OSError, ValueError, AttributeError):
        base = kind = ""
    return ModelError(
        f"{place} is a PEFT adapter{f' of type {kind}' if kind else ''}, no model: load its base "
        f"model{f' {base}' if base else ''}, merge the adapter into it (merge_and_unload) and save "
        "both, with save_pretrained, in a folder"
    )


def parameters(files: Sequence[Path]) -> int:
    """How many numbers the files hold, from their headers; a shared tensor counts once.

    Of files of `torch.save` before PyTorch 1.6, estimated as if they were in 16 bits.

    Raises:
        ModelError: a file is damaged, or a safetensors file is not whole.
    """
    return sum(_parameters(path) for path in files)


def _parameters(path: Path) -> int:
    size = path.stat().st_size
    if path.suffix.lower() == ".gguf":
        return read_header(path).numbers
    if path.suffix != ".safetensors":
        return _numbers_of_bin(path) if is_zipfile(path) else size // 2
    try:
        with _opened(path) as f:
            length = int.from_bytes(f.read(8), "little")
            header = json.loads(f.read(length) if length < size else b"")
        header.pop("__metadata__", None)
        whole = 8 + length + max(t["data_offsets"][1] for t in header.values())
        count = sum(math.prod(t["shape"]) for t in header.values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} is not a safetensors file; fetch the model again") from error
    if size != whole:
        raise ModelError(f"{path} has {size:,} bytes of {whole:,}; fetch the model again")
    return count


def _numbers_of_bin(path: Path) -> int:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        tensors = [x for x in found.values() if isinstance(x, torch.Tensor)]
    except Exception as error:  # of pickle, zip and torch
        raise ModelError(f"{path} is not a PyTorch weight file; fetch the model again") from error
    return sum({(x.data_ptr(), x.shape): x.numel() for x in tensors}.values())


def digest(files: Sequence[Path]) -> str:
    """Identity of the weights: `sha256:...` of the content, or `sampled:...` above `WHOLE` bytes.

    Several files are hashed one after the other in the order of their names. A sampled digest
    covers each file's name, size and 256 blocks of 64 KiB spread over it: any fine-tune or
    conversion changes it, and a copy on another machine does not.
    """
    ordered = sorted(files, key=lambda path: path.name)
    if sum(path.stat().st_size for path in ordered) <= WHOLE:
        if len(ordered) == 1:
            with _opened(ordered[0]) as f:
                return "sha256:" + hashlib.file_digest(f, "sha256").hexdigest()
        state = hashlib.sha256()
        for path in ordered:
            with _opened(path) as f:
                while chunk := f.read(1 << 20):
                    state.update(chunk)
        return "sha256:" + state.hexdigest()
    state = hashlib.sha256()
    for path in ordered:
        size = path.stat().st_size
        state.update(f"{path.name}\0{size}\0".encode())
        with _opened(path) as f:
            for i in range(_BLOCKS):
                f.seek(i * max(size - _BLOCK, 0) // (_BLOCKS - 1))
                state.update(f.read(_BLOCK))
    return "sampled:" + state.hexdigest()


def _opened(path: Path) -> BufferedReader:
    try:
        return path.open("rb")
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
