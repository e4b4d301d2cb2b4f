"""Fixtures that several test files share.

They import torch and what needs it themselves: the process that hands out tests needs none of it,
and the others would wait for it.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from kvsearch.models.load import LoadedModel


@pytest.fixture(scope="session", autouse=True)
def cores() -> None:
    """Processes that run tests side by side share the cores, and so does what they start."""
    import torch

    beside = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    threads = max(1, torch.get_num_threads() // beside)
    torch.set_num_threads(threads)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))


@pytest.fixture(scope="module", autouse=True)
def pictures(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs of a tiny model take half of their time to draw: only modules with PICTURES do."""
    with pytest.MonkeyPatch.context() as patch:
        if not getattr(request.module, "PICTURES", False):
            patch.setattr("kvsearch.report.pareto_figure.draw", lambda *_, **__: None)
            patch.setattr("kvsearch.report.figure.png", lambda _: b"PNG")
            for name in ("slotmap_png.draw_slots", "needles.draw_needles"):
                patch.setattr(f"kvsearch.report.{name}", lambda *_, **__: b"PNG")
            for module in ("figure", "html"):
                patch.setattr(f"kvsearch.report.{module}.svg", lambda *_: "<svg></svg>")
        yield


@pytest.fixture(scope="session")
def real_model() -> "LoadedModel":
    """SmolLM2-135M in fp32 on the CPU; downloaded once and then kept in the user's cache."""
    from kvsearch.errors import ModelError
    from kvsearch.models.load import load_model

    try:
        return load_model(device="cpu")
    except ModelError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def loaded() -> "LoadedModel":
    """A random Llama of four layers in float64, without a tokenizer."""
    from tests.cache_cases import tiny

    return tiny()


@pytest.fixture(scope="module")
def models() -> "dict[int, LoadedModel]":
    """The same by its head size."""
    from tests.cache_cases import tiny

    return {D: tiny(head_dim=D) for D in (16, 32)}


@pytest.fixture(scope="session")
def tiny_tokenizer() -> "PreTrainedTokenizerFast":
    """One token a byte, ids 0 to 255; 256 is the end token, and nothing is added to a text."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>")


@pytest.fixture(scope="session")
def prose(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a text of 3,000 words."""
    file = tmp_path_factory.mktemp("text") / "prose.txt"
    words = "the cache keeps what the next token will want to look at again and again".split()
    file.write_text(" ".join(words[(i * i + 3 * i) % len(words)] for i in range(3000)))
    return file


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer) -> Path:
    """A folder with a random two-layer Llama and `tiny_tokenizer`."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    folder = tmp_path_factory.mktemp("tiny")
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    with torch.random.fork_rng():  # the same whatever ran before
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder
