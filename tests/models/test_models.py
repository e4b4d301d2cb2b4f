"""Loading models: names, damaged files, memory, digests, the GGUF copy."""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.utils import logging

from kvsearch.errors import ModelError
from kvsearch.evaluation.evaluator import Evaluator
from kvsearch.models import default_weights, load, memory, products
from kvsearch.models.across_devices import _Moves, placement, spread
from kvsearch.models.aliases import ALIASES, DEFAULT
from kvsearch.models.gguf import converted
from kvsearch.models.load import dtype_named, load_model, max_context
from kvsearch.models.read import read
from kvsearch.models.weights import digest, parameters
from kvsearch.policy import Policy
from kvsearch.rules import Attention
from kvsearch.run.evaluators import devices


def test_a_folder_loads_ready_to_evaluate(tiny_folder):
    loaded = load_model(str(tiny_folder), device="cpu", announce=pytest.fail)
    assert (loaded.shape.layers, loaded.shape.kv_heads, loaded.shape.head_dim) == (2, 2, 8)
    assert (loaded.dtype, loaded.device, loaded.revision) == ("float32", "cpu", None)
    assert not loaded.model.training
    assert not any(p.requires_grad for p in loaded.model.parameters())
    raw = (tiny_folder / "model.safetensors").read_bytes()
    assert loaded.digest == "sha256:" + hashlib.sha256(raw).hexdigest()
    assert parameters([tiny_folder / "model.safetensors"]) == loaded.model.num_parameters()
    assert max_context(loaded.model.config) == 512
    assert loaded.tokenizer.decode(loaded.tokenizer("héllo").input_ids) == "héllo"
    half = load_model(str(tiny_folder), device="cpu", dtype="bf16")
    assert half.dtype == "bfloat16" and half.model.dtype == torch.bfloat16


def test_loading_leaves_the_settings_of_transformers_alone(tiny_folder, tmp_path):
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    load_model(str(tiny_folder), device="cpu")
    with pytest.raises(ModelError):
        read(tmp_path, torch.float32)
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("smolm2-135m", "did you mean 'smollm2-135m'"),
        ("Zq", "unknown model 'Zq'; known are gemma-2b"),
        ("~no-such-user/m.gguf", "no file or folder ~no-such-user"),
        ("./nowhere", "no file or folder ./nowhere"),
        ("nowhere/model.gguf", "no file or folder"),
    ],
)
def test_a_wrong_name_gets_one_sentence(name, words):
    with pytest.raises(ModelError) as caught:
        load_model(name, device="cpu")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda f: (f / "model.safetensors").unlink(), "has no model.safetensors"),
        (lambda f: cut_short(f / "model.safetensors"), "fetch the model again"),
        (lambda f: (f / "model.safetensors").write_bytes(b"x" * 99), "not a safetensors file"),
        (lambda f: (f / "config.json").write_text("{"), "transformers cannot load"),
        (lambda f: change(f, model_type="nonesuch"), "transformers cannot load"),
        (lambda f: change(f, num_hidden_layers=3), "lacks 9 weights of its model"),
        (
            lambda f: change(f, num_key_value_heads=4),
            "k_proj.weight': [16, 32] instead of [32, 32]",
        ),
        (lambda f: [p.unlink() for p in f.glob("tok*")], "transformers cannot load"),
        (lambda f: (f / "config.json").unlink(), "neither a config.json nor a .gguf"),
        (lambda f: gguf_instead(f), "is not a GGUF file"),
        (lambda f: other_weights(f, "Q4.gguf"), "GGUF file: give the path of Q4.gguf"),
        (lambda f: other_weights(f, "a.gguf", "b.gguf"), "give the path of one of a.gguf, b.gguf"),
        (lambda f: other_weights(f, "model.fp16.safetensors"), "it has model.fp16.safetensors, as"),
        (lambda f: other_weights(f, "pytorch_model.bf16.bin"), "it has pytorch_model.bf16.bin, as"),
        (lambda f: other_weights(f, "model-00001-of-00002.safetensors"), "lacks the index that"),
        (lambda f: other_weights(f, "consolidated.safetensors"), "has consolidated weights"),
        (lambda f: below(f, "original"), "give the folder original in it"),
        (
            lambda f: adapter_instead(f, base_model_name_or_path="me/base", peft_type="LORA"),
            "is a PEFT adapter of type LORA, no model: load its base model me/base",
        ),
        (lambda f: adapter_instead(f), "is a PEFT adapter, no model: load its base model, merge"),
        (lambda f: index_instead(f, []), "index.json is damaged"),
        (lambda f: index_instead(f, {"weight_map": {"a": 1}}), "index.json is damaged"),
        (lambda f: index_instead(f, {"weight_map": {"a": "b.safetensors"}}), "lacks b.safetensors"),
    ],
)
def test_a_damaged_folder_gets_one_sentence(tiny_folder, tmp_path, break_it, words):
    folder = tmp_path / "m"
    shutil.copytree(tiny_folder, folder)
    break_it(folder)
    with pytest.raises(ModelError) as caught:
        load_model(str(folder), device="cpu")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"sliding_window": 5}, "every layer of this 'llama' model has a sliding window"),
        ({"model_type": "t5"}, "has an encoder and a decoder"),
        ({"num_attention_heads": "4"}, "Validation error for field 'num_attention_heads': .*int"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused_before_weights_are_read(
    tiny_folder, tmp_path, monkeypatch, fields, words
):
    folder = tmp_path / "m"
    shutil.copytree(tiny_folder, folder)
    change(folder, **fields)
    monkeypatch.setattr(load, "read", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(ModelError, match=words) as caught:
        load_model(str(folder), device="cpu")
    assert "\n" not in str(caught.value)


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-100])


def change(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def index_instead(folder, content):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


def other_weights(folder, *names):
    (folder / "model.safetensors").unlink()
    for name in names:
        (folder / name).write_bytes(b"x" * 64)


def below(folder, name):
    files = list(folder.iterdir())
    (folder / name).mkdir()
    for file in files:
        file.rename(folder / name / file.name)


def adapter_instead(folder, **config):
    other_weights(folder, "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))


def gguf_instead(folder):
    (folder / "config.json").unlink()
    (folder / "m.gguf").write_bytes(b"GGML....")


def test_weights_of_somebody_else_get_one_sentence(tiny_folder, monkeypatch):
    usual = Path.open

    def opened(path, *args, **more):
        if path.suffix == ".safetensors":
            raise PermissionError(13, "Permission denied")
        return usual(path, *args, **more)

    monkeypatch.setattr(Path, "open", opened)
    with pytest.raises(ModelError, match=r"cannot read .*model\.safetensors: Permission denied"):
        load_model(str(tiny_folder), device="cpu")


def test_too_little_memory_is_refused_before_loading(tiny_folder, monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda device: 1000)
    with pytest.raises(ModelError, match=r"needs 0\.0 GB of memory as float32.*--dtype bfloat16"):
        load_model(str(tiny_folder), device="cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_numbers_of_a_bin_file_are_counted_once(tmp_path, dtype):
    file = tmp_path / "pytorch_model.bin"
    shared = torch.zeros(50, 100, dtype=dtype)
    torch.save({"a": shared, "b": shared, "c": torch.zeros(64)}, file)
    assert parameters([file]) == 50 * 100 + 64
    torch.save([1, 2], file)
    with pytest.raises(ModelError, match=r"is not a PyTorch weight file"):
        parameters([file])


def test_the_tightest_control_group_counts(tmp_path, monkeypatch):
    """A batch job has its limit above the group that its processes are in."""
    task = tmp_path / "groups" / "job" / "step"
    task.mkdir(parents=True)
    for folder, limit in ((task, "max"), (task.parent, "1000")):
        (folder / "memory.max").write_text(limit)
        (folder / "memory.current").write_text("300")
        (folder / "memory.stat").write_text("anon 200\ninactive_file 60\nactive_file 40\n")
    (tmp_path / "cgroup").write_text("0::/job/step\n")
    monkeypatch.setattr(memory, "GROUP", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "GROUPS", tmp_path / "groups")
    assert memory.free_memory(torch.device("cpu")) == 800


def test_free_memory_is_plausible():
    free = memory.free_memory(torch.device("cpu"))
    assert free is None or 1 << 20 < free < 1 << 50


REFUSALS = [
    RuntimeError("The NVIDIA driver on your system is too old (found version 11040)."),
    AssertionError("Torch not compiled with CUDA enabled"),
    torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be reported late"),
    torch.AcceleratorError("CUDA error: CUDA-capable device(s) is/are busy or unavailable\nMore"),
]


@pytest.mark.parametrize("error", REFUSALS, ids=lambda e: str(e)[:30])
def test_a_gpu_that_cannot_be_used_is_one_sentence(tiny_folder, monkeypatch, error):
    def refuse(*_):
        raise error

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", refuse)
    with pytest.raises(ModelError, match="choose another GPU with CUDA_VISIBLE_DEVICES") as caught:
        load_model(str(tiny_folder), device="cuda")
    line = str(error).splitlines()[0].rstrip(".")
    assert str(caught.value).startswith(f"cuda:0 cannot be used: {line}; ")
    assert "\n" not in str(caught.value)


def test_a_gpu_without_kernels_is_found_when_the_model_is_there(tiny_folder, monkeypatch):
    """A model can be moved to a GPU that is too old for this torch: nothing is computed yet."""
    tried = []

    def refuse(device):
        tried.append(device)
        raise torch.AcceleratorError("CUDA error: no kernel image is available\nMore")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 40, 1 << 40))
    monkeypatch.setattr(load, "spread", lambda model, places: model)
    monkeypatch.setattr(load, "_multiply", refuse)
    with pytest.raises(ModelError, match="no kernel image is available; choose another") as caught:
        load_model(str(tiny_folder), device="cpu,cuda:1")
    assert "\n" not in str(caught.value) and tried == [torch.device("cuda", 1)]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"dtype": "float23"}, "did you mean"),
        ({"device": "abacus"}, "unknown device 'abacus'"),
        ({"device": "meta"}, "device meta holds no numbers"),
        ({"device": "cuda:99"}, "cuda:99 is not there"),
        ({"device": "cpu:3"}, "cpu:3 is not there"),
    ],
)
def test_wrong_dtype_or_device(tiny_folder, given, words):
    with pytest.raises(ModelError, match=words):
        load_model(str(tiny_folder), **given)


@pytest.mark.parametrize(
    ("capability", "kind"), [((7, 5), torch.float16), ((8, 0), torch.bfloat16)]
)
def test_gpus_that_compute_bf16_in_software_get_fp16(monkeypatch, capability, kind):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert dtype_named("auto", torch.device("cuda", 0)) == kind
    assert dtype_named("bfloat16", torch.device("cuda", 0)) == torch.bfloat16


def test_a_model_is_spread_in_order_and_computes_the_same(tiny_folder):
    loaded = load_model(str(tiny_folder), device="cpu")
    ids = np.random.default_rng(0).integers(0, 97, (2, 60))
    policy = Policy(slots=24, interval=4, recent_window=8, rule=Attention(beta=1))
    alone = Evaluator(loaded, batch=2).quality(policy, ids).nll
    devices = [torch.device("cpu", i) for i in range(2)]  # two names of one device
    where = placement(loaded.model, devices)
    layers = [where[f"model.layers.{i}"].index for i in range(loaded.shape.layers)]
    assert layers == sorted(layers) and layers[-1] == 1
    assert {where[n].index for n in ("model.embed_tokens", "model.norm", "lm_head")} == {0}
    assert {name for name, p in loaded.model.named_modules() if list(p.parameters(False))} <= {
        name for name, _ in loaded.model.named_modules() if any(name.startswith(w) for w in where)
    }  # every weight has its place
    asked: list[torch.device] = []
    moved = _Moves._moved
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Moves, "_moved", lambda s, x: asked.append(s.device) or moved(s, x))
        spread(loaded.model, devices)
        there = Evaluator(loaded, batch=2).quality(policy, ids).nll
    assert np.array_equal(alone, there) and set(asked) == set(devices)
    with pytest.raises(ModelError, match="cannot be spread over 99"):
        placement(loaded.model, [torch.device("cpu")] * 99)


@pytest.mark.parametrize(
    ("device", "each", "groups"),
    [
        ("auto", 0, ["cuda:0", "cuda:1", "cuda:2", "cuda:3", "cuda:4"]),
        ("cuda", 2, ["cuda:0,cuda:1", "cuda:2,cuda:3"]),
        ("cuda:1,cuda:3", 0, ["cuda:1,cuda:3"]),
        ("cuda:1,cuda:3", 1, ["cuda:1", "cuda:3"]),
        ("cuda:1", 0, ["cuda:1"]),
    ],
)
def test_evaluators_share_out_the_gpus(device, each, groups, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
    assert list(devices(device, each)) == groups
    with pytest.raises(ModelError, match=r"--gpus-per-evaluator is 6, and .* [125] CUDA devices"):
        devices(device, 6)


def test_aliases_are_lower_case_hub_ids():
    assert DEFAULT in ALIASES
    for short, repo in ALIASES.items():
        assert short == short.lower() and repo.count("/") == 1


def test_a_sampled_digest_survives_a_copy_and_sees_a_change(tmp_path, monkeypatch):
    monkeypatch.setattr("kvsearch.models.weights.WHOLE", 0)
    (tmp_path / "b").mkdir()
    a, b = tmp_path / "w.bin", tmp_path / "b" / "w.bin"
    a.write_bytes(bytes(100_000))
    b.write_bytes(bytes(100_000))
    assert digest([a]).startswith("sampled:") and digest([a]) == digest([b])
    b.write_bytes(bytes(99_999) + b"1")
    assert digest([a]) != digest([b])


@pytest.mark.slow
@pytest.mark.real
def test_the_kept_copy_is_bit_equal_to_the_gguf_file(real_model, capfd):
    path, _ = default_weights.find()
    capfd.readouterr()
    model, tokenizer = read(path.parent, torch.float32, gguf=path.name)
    assert capfd.readouterr() == ("", "")
    assert converted(path, default_weights.SHA256, pytest.fail) is not None
    assert real_model.digest == f"sha256:{default_weights.SHA256}"
    text = "The key-value cache of a language model grows with every token — naïvely.\n" * 4
    ids = tokenizer(text).input_ids
    assert real_model.tokenizer(text).input_ids == ids
    fast = any(isinstance(m, products.OneDnnLinear) for m in real_model.model.modules())
    least = products.suits()
    assert fast is (least is not None)
    if least is not None:  # then a loaded model sums in another order
        products.by_onednn(model, least)
    with torch.no_grad():
        batch = torch.tensor([ids])
        assert torch.equal(model(batch).logits, real_model.model(batch).logits)
    state = real_model.model.state_dict()
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert real_model.shape.budget_bytes(1) == 30 * 3 * 64 * 4
