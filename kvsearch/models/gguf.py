"""GGUF files: a converted copy in the cache folder, because transformers is slow to read them.

For SmolLM2-135M (98 MB, Q4_1) the conversion takes 16 s and the copy (538 MB) loads in 0.3 s.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

from kvsearch.errors import ModelError
from kvsearch.models.disk_cache import cache_folder, keep
from kvsearch.models.gguf_header import read_header
from kvsearch.models.gguf_rope import scales
from kvsearch.models.read import quiet, read
from kvsearch.models.weights import parameters

BYTES = {"fp32": 4, "fp16": 2}
KEEP_BELOW = 4 << 30  # bytes of fp32 copy; above this, disk matters more than a minute


def check(path: Path) -> None:
    """Refuse a file that is not GGUF, whatever its name.

    Raises:
        ModelError: it is not, or cannot be read.
    """
    try:
        with path.open("rb") as f:
            magic = f.read(4)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    if magic != b"GGUF":
        raise ModelError(f"{path} is not a GGUF file (it does not start with 'GGUF')")


def converted(path: Path, sha256: str, announce: Callable[[str], None]) -> Path | None:
    """Folder with the model of a GGUF file as fp32 safetensors and a tokenizer.

    The copy belongs to the file's content and the version of transformers that converted it. Its
    logits are bit-equal to those of the model loaded from the file.

    Args:
        path: the `.gguf` file.
        sha256: its digest, hexadecimal.
        announce: called with a sentence before the conversion.

    Returns:
        The folder, or None where a copy would be too large or cannot be written; the caller then
        loads the file itself.
    """
    size = parameters([path]) * 4
    if size > KEEP_BELOW:
        return None

    def make(draft: Path) -> None:
        announce(
            f"converting {path.name} once (about {size / 1e9:.1f} GB in {cache_folder()}); "
            "the next load is faster"
        )
        if shutil.disk_usage(draft).free < 2 * size:
            raise OSError("not enough free space")
        model, tokenizer = read(path.parent, torch.float32, gguf=path.name)
        _forget_quantisation(model)
        with quiet():
            model.save_pretrained(draft)
            tokenizer.save_pretrained(draft)

    rope = "-rope" if scales(read_header(path)) else ""  # copies were made without it before
    try:
        return keep(f"gguf-{sha256[:16]}-transformers-{transformers.__version__}{rope}", make)
    except OSError as error:
        announce(f"no converted copy of {path.name} is kept in {cache_folder()}: {error}")
        return None


def _forget_quantisation(model: Any) -> None:
    """Make a de-quantised model an ordinary one; `save_pretrained` refuses it otherwise."""
    model.hf_quantizer = None
    model.quantization_method = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config


def dequantised(
    path: Path, sha256: str, kind: Literal["fp32", "fp16"], announce: Callable[[str], None]
) -> Path:
    """A GGUF file with the weights of another in plain numbers, for engines that read only GGUF.

    Such an engine then multiplies by the same numbers as transformers, to which weights are
    de-quantised, instead of rounding activations to go with them.

    Args:
        path: the `.gguf` file.
        sha256: its digest, hexadecimal.
        kind: type of the matrices; vectors are in fp32.
        announce: called with a sentence before the conversion.

    Raises:
        ModelError: there is no room for it.
    """

    def make(draft: Path) -> None:
        size = parameters([path]) * BYTES[kind]
        announce(
            f"writing {path.name} in {kind} once (about {size / 1e9:.1f} GB in {cache_folder()})"
        )
        if shutil.disk_usage(draft).free < 2 * size:
            raise OSError("not enough free space")
        _write(path, draft / f"{kind}.gguf", kind)

    try:
        return keep(f"gguf-{sha256[:16]}-{kind}", make) / f"{kind}.gguf"
    except OSError as error:
        raise ModelError(f"{path} cannot be kept in {kind} in {cache_folder()}: {error}") from error


def _write(source: Path, place: Path, kind: Literal["fp32", "fp16"]) -> None:
    import gguf

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(place, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        of = field.types[0]
        inner = field.types[-1] if of == gguf.GGUFValueType.ARRAY else None
        all_fp16 = int(kind == "fp16")  # ggml's number of the file type
        value = all_fp16 if name == "general.file_type" else field.contents()
        writer.add_key_value(name, value, of, sub_type=inner)
    for tensor in reader.tensors:
        x = gguf.dequantize(tensor.data, tensor.tensor_type)
        half = kind == "fp16" and x.ndim > 1
        writer.add_tensor(tensor.name, x.astype("float16" if half else "float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
