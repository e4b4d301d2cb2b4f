"""Loading a causal language model by name, on the dtype and device asked for."""

import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from kvsearch.errors import ModelError, TextError, nearest, quoted
from kvsearch.models import in_memory, products
from kvsearch.models.across_devices import spread
from kvsearch.models.aliases import DEFAULT
from kvsearch.models.gguf import converted, dequantised
from kvsearch.models.gguf_header import read_header
from kvsearch.models.gguf_rope import unread
from kvsearch.models.head import Head
from kvsearch.models.locate import locate
from kvsearch.models.memory import ELSEWHERE, require_memory
from kvsearch.models.read import brief, configuration, parameters_of, read, tokenizer_in
from kvsearch.models.shape import entrance, shape_of, text_config
from kvsearch.models.vocabulary import misfit
from kvsearch.models.weights import digest, parameters, weight_files
from kvsearch.policy import ModelShape
from kvsearch.policy.anchors import NEW

DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}
_PEAK_OF_GGUF = 1.5  # memory while de-quantising, in units of the fp32 weights; measured 1.43


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to be evaluated: eval mode, no gradients, on its device.

    Attributes:
        model: the transformers model.
        tokenizer: its tokenizer.
        shape: sizes of the layers that a policy governs.
        name: as the user gave it; the same name loads the same model again.
        origin: a sentence for people: where the weights came from.
        digest: identity of the weight files as found, before any conversion: `sha256:...`, or
            `sampled:...` for more than 4 GiB (see `weights.digest`); `memory:...` of a model that
            was not loaded by its name.
        revision: commit on the hub; None for local files.
        dtype: of the weights in memory, such as `float32`.
        device: such as `cpu` or `cuda:0`; where tokens come in and logits go out.
        others: further devices that hold layers, where it is spread over several.
    """

    model: Any
    tokenizer: Any
    shape: ModelShape
    name: str
    origin: str
    digest: str
    revision: str | None
    dtype: str
    device: str
    others: tuple[str, ...] = ()

    @property
    def devices(self) -> str:
        """As `load_model` takes them: `cpu`, `cuda:0` or `cuda:0,cuda:1`."""
        return ",".join((self.device, *self.others))

    @classmethod
    def of(cls, model: Any, tokenizer: Any, name: str = "model") -> "LoadedModel":
        """A transformers model of your own and its tokenizer; the model is put in eval mode.

        Only this process can evaluate on it: other processes load a model by its name.

        Args:
            model: a causal language model, on any device and in any dtype; with adapters of PEFT
                in its layers, such as LoRA, dynamically quantised, offloaded by accelerate, too.
                What `torch.compile` and `DataParallel` return is evaluated as the model inside it.
            tokenizer: its tokenizer.
            name: for records.

        Raises:
            ModelError: it is none that policies can be run on, or it has no weights.
        """
        model = in_memory.causal(model)
        shape, digest = shape_of(model.config), in_memory.digest(model)
        first = next(model.parameters())
        Head(model.eval())  # or an evaluation would find out later
        if warning := misfit(model, tokenizer):
            warnings.warn(warning, RuntimeWarning, stacklevel=2)
        return cls(
            model=model,
            tokenizer=tokenizer,
            shape=shape,
            name=name,
            origin="given in memory",
            digest=digest,
            revision=None,
            dtype=str(first.dtype).removeprefix("torch."),
            device=str(entrance(model)),
        )

    @property
    def silent(self) -> int | None:
        """The token of inserted anchors, if the tokenizer has one; it is never to be predicted."""
        found = None if self.tokenizer is None else self.tokenizer.get_vocab().get(NEW)
        return None if found is None else int(found)

    @property
    def in_memory(self) -> bool:
        """Whether no name leads to this model, so that no other process can load it."""
        return self.digest.startswith(in_memory.MEMORY)


def to_stderr(sentence: str) -> None:
    """Print a sentence where it does not mix with results."""
    print(sentence, file=sys.stderr, flush=True)


def load_model(
    name: str = DEFAULT,
    *,
    dtype: str = "auto",
    device: str = "auto",
    context: int = 0,
    announce: Callable[[str], None] = to_stderr,
) -> LoadedModel:
    """Load a causal language model.

    Args:
        name: an alias, a hub id, a local folder or a `.gguf` file.
        dtype: `auto` (float32 on a CPU, bfloat16 elsewhere), `float32`, `bfloat16` or `float16`.
        device: `auto` (`cuda` where there is one, else `cpu`) or any torch device, or several with
            commas between them, over which the layers are spread.
        context: tokens that it has to be run over.
        announce: called before anything slow or large happens, with one sentence each.

    Returns:
        Model and tokenizer, with the shape of the cache and a digest of the weights.

    Raises:
        TextError: its positions do not reach `context` tokens; no weights were read.
        ModelError: the model cannot be found, downloaded, read, held in memory or served; or
            `dtype` or `device` is not one that this machine has.
    """
    places = [device_named(one) for one in device.split(",")]
    kind = dtype_named(dtype, places[0])
    cpu = torch.device("cpu")

    def refuse(count: int) -> None:
        require_memory(count, kind, cpu, name)
        each = -(-count // len(places))
        share = name if len(places) == 1 else f"one of {len(places)} parts of {name}"
        for place in places:
            if place != cpu:
                require_memory(each, kind, place, share)

    found = locate(name, announce, refuse)
    folder, gguf = found.folder, found.gguf
    if gguf is None:
        identity = digest(weight_files(folder))
    else:
        file = folder / gguf
        identity = digest([file])
        require_memory(int(_PEAK_OF_GGUF * parameters([file])), torch.float32, cpu, name)
        copy = converted(file, identity.partition(":")[2], announce)
        if copy is not None:
            folder, gguf = copy, None
    if gguf is None:
        refuse(parameters(weight_files(folder)))
    if gguf is None:
        config = configuration(folder)
        shape_of(config)
        require_context(config, context)
    model, tokenizer = read(folder, kind, gguf=gguf)
    require_context(model.config, context)
    shape = shape_of(model.config)
    try:
        model = spread(model, places) if len(places) > 1 else model.to(places[0])
        model = model.eval().requires_grad_(False)
        for place in places:
            if place.type == "cuda":
                _multiply(place)
    # Out of memory, a device that this build of torch does not have or a GPU too old for it.
    except (RuntimeError, AssertionError) as error:
        hint = f"; {ELSEWHERE}" if any(p.type == "cuda" for p in places) else ""
        raise ModelError(f"{name} cannot be put on {device}: {brief(error)}{hint}") from error
    if warning := misfit(model, tokenizer):
        announce(f"warning: {warning}")
    if found.gguf and (left := unread(read_header(found.folder / found.gguf), model)):
        announce(f"warning: nothing was made of {', '.join(left)} of {found.gguf}")
    least = products.suits()
    if places == [cpu] and kind == torch.float32 and least is not None:
        products.by_onednn(model, least)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        shape=shape,
        name=name,
        origin=found.origin,
        digest=identity,
        revision=found.revision,
        dtype=str(kind).removeprefix("torch."),
        device=str(places[0]),
        others=tuple(map(str, places[1:])),
    )


def _multiply(device: torch.device) -> None:
    """Multiply on a GPU, which fails on one that torch has no kernels for."""
    x = torch.ones(8, 8, dtype=torch.float32, device=device)
    torch.mm(x, x)
    torch.cuda.synchronize(device)


def shape_named(name: str, announce: Callable[[str], None] = to_stderr) -> ModelShape:
    """Shape of a model, from its configuration alone; the weights are not read.

    Raises:
        ModelError: the model cannot be found, or is of a family that policies cannot be run on.
    """
    found = locate(name, announce, lambda count: None, weights=False)
    return shape_of(configuration(found.folder, gguf=found.gguf))


def configured(name: str, announce: Callable[[str], None] = to_stderr) -> tuple[Any, int]:
    """The configuration of a model, and the bytes of its weights: those of its files, or 16 bits.

    Raises:
        ModelError: the model cannot be found, or transformers does not know its kind.
    """
    found = locate(name, announce, lambda count: None, weights=False)
    config = configuration(found.folder, gguf=found.gguf)
    files = [found.folder / found.gguf] if found.gguf else []
    with suppress(ModelError):  # a configuration alone
        files = files or weight_files(found.folder)
    return config, sum(file.stat().st_size for file in files) or 2 * parameters_of(config)


def gguf_in(
    kind: Literal["fp32", "fp16"], name: str, announce: Callable[[str], None] = to_stderr
) -> Path:
    """A GGUF file with the weights of a GGUF model in plain numbers, see `gguf.dequantised`.

    Raises:
        ModelError: the model cannot be found, or is no GGUF file.
    """
    found = locate(name, announce, lambda count: None)
    if found.gguf is None:
        raise ModelError(f"{name} is no GGUF file, and this runtime reads nothing else; name one")
    file = found.folder / found.gguf
    return dequantised(file, digest([file]).partition(":")[2], kind, announce)


def folder_of(name: str, announce: Callable[[str], None] = to_stderr) -> Path:
    """A folder from which transformers, and servers that read like it, load a model.

    Raises:
        ModelError: the model cannot be found, or is a GGUF file and no converted copy can be kept.
    """
    found = locate(name, announce, lambda count: None)
    if found.gguf is None:
        return found.folder
    file = found.folder / found.gguf
    copy = converted(file, digest([file]).partition(":")[2], announce)
    if copy is None:
        raise ModelError(f"{name} is a GGUF file, and this runtime reads folders; name a folder")
    return copy


def tokenizer_named(name: str, announce: Callable[[str], None] = to_stderr) -> Any:
    """The tokenizer of a model; the weights are found, and not read.

    Raises:
        ModelError: as `folder_of`, or it has none.
    """
    return tokenizer_in(folder_of(name, announce))


def max_context(model_config: Any) -> int | None:
    """Tokens that the model's positions reach, or None where its config sets no bound."""
    found = getattr(text_config(model_config), "max_position_embeddings", None)
    return int(found) if found else None


def require_context(model_config: Any, context: int) -> None:
    """Raise a `TextError` if the model's positions do not reach `context` tokens."""
    most = max_context(model_config)
    if most is not None and context > most:
        raise TextError(
            f"the model's positions reach {most} tokens, fewer than {context}; lower --context"
        )


def device_named(name: str) -> torch.device:
    """The device called `name`, or under `auto` the first GPU that is there, else the CPU.

    Raises:
        ModelError: there is none.
    """
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelError(
            f"unknown device {quoted(name)}; give auto, cpu, cuda or cuda:N"
        ) from error
    if device.type == "meta":
        raise ModelError("device meta holds no numbers; give auto, cpu, cuda or cuda:N")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise ModelError(f"device {name} is not there: torch sees {count} CUDA devices")
        return torch.device("cuda", device.index or 0)
    if device.type == "cpu" and device.index:
        raise ModelError(f"device {name} is not there: a machine's cores are one device, cpu")
    return device


def dtype_named(name: str, device: torch.device) -> torch.dtype:
    """The type called `name`, or under `auto` fp32 on a CPU and bf16 elsewhere.

    GPUs before Ampere compute bf16 in software; there it is fp16.

    Raises:
        ModelError: there is none.
    """
    if name == "auto":
        if device.type == "cpu":
            return torch.float32
        return torch.float16 if _before_ampere(device) else torch.bfloat16
    if name not in DTYPES:
        raise ModelError(f"unknown dtype {quoted(name)}{nearest(name, ['auto', *DTYPES])}")
    return DTYPES[name]


def _before_ampere(device: torch.device) -> bool:
    """Of a GPU that cannot be used `memory` says so, when its memory is asked for."""
    with suppress(RuntimeError, AssertionError):
        return device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)
    return False
