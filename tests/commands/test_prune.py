"""`kvsearch prune`: a smaller checkpoint that says what the view says."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from kvsearch import Policy, Text, load_model
from kvsearch.cache import PolicyCache
from kvsearch.commands.prune import prune
from kvsearch.errors import KvsearchError, ModelError, RunError
from kvsearch.evaluation.evaluator import Evaluator, stepwise
from kvsearch.models.load import LoadedModel
from kvsearch.policy import Channels, layout
from kvsearch.rules import Attention
from tests.command import call

WORDS: dict[str, Channels] = {
    "channels": Channels(
        qk=("1e d2", "none", "all", "3c f"), vo=("ff00 5555", "none", "f33 3cf", "all")
    ),
    "layers": Channels(qk=("none", "all", "none", "all"), vo=("none", "all", "none", "all")),
}
CONFIGS = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config}
IDS = np.random.default_rng(1).integers(0, 256, size=(1, 90))


def made(config_class, tokenizer, **more) -> LoadedModel:
    torch.manual_seed(0)
    sizes = dict(
        vocab_size=257, hidden_size=96, intermediate_size=256, num_hidden_layers=4,
        num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=512, head_dim=16,
    )  # fmt: skip
    config = config_class(**(sizes | more))
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for p in model.parameters():
        if p.dim() > 1:
            p.mul_(3)
        elif p.shape[0] != config.hidden_size:  # biases start at 0
            p.add_(torch.randn_like(p))
    return LoadedModel.of(model, tokenizer)


def logits(model, cache=None) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.from_numpy(IDS), past_key_values=cache).logits


@pytest.mark.parametrize("what", WORDS)
@pytest.mark.parametrize("family", CONFIGS)
def test_surgery_is_the_view(family: str, what: str, tiny_tokenizer, tmp_path: Path) -> None:
    more = {"sliding_window": None} if family == "mistral" else {"tie_word_embeddings": True}
    loaded = made(CONFIGS[family], tiny_tokenizer, **more)
    policy, out = Policy(channels=WORDS[what], name="mine"), tmp_path / "small"
    done = prune(policy, loaded, out, progress=False)
    view = PolicyCache(policy, loaded.model, native=torch.float32)
    whole = logits(loaded.model, view)
    small = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
    cache = DynamicCache(config=small.config)
    torch.testing.assert_close(logits(small, cache), whole, atol=1e-5, rtol=1e-5)
    held = sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))
    assert held == view.bytes_resident == 2 * 90 * done.token_bytes  # in float32
    saved = sum(f.stat().st_size for f in out.glob("*.safetensors"))
    assert done.parameters < done.parameters_before
    assert 0 < saved - 4 * done.parameters < 10_000
    again = load_model(str(out), device="cpu", announce=lambda _: None)
    assert again.shape == layout(policy, loaded.shape).shape
    rest = Policy.from_json(out / "policy.json")
    assert not rest.channels.active and rest.about["channels"]["qk"] == list(WORDS[what].qk)
    evict = Policy(slots=40, interval=8, sinks=2, recent_window=6, rule=Attention())
    slow, cache = stepwise(again, evict, IDS)
    quality = Evaluator(again).quality(evict, IDS)
    assert np.abs(slow - quality.nll).max() < 1e-3
    assert cache.bytes_resident == quality.bytes_resident == layout(evict, again.shape).bytes_at(90)


def test_whole_layers_are_gone_as_nemotron_nas_says_it(tiny_tokenizer, tmp_path: Path) -> None:
    loaded = made(LlamaConfig, tiny_tokenizer)
    prune(Policy(channels=WORDS["layers"]), loaded, tmp_path / "small", progress=False)
    config = json.loads((tmp_path / "small" / "config.json").read_text())
    assert config["model_type"] == "nemotron-nas"
    assert config["architectures"] == ["DeciLMForCausalLM"]
    first, second = (config["block_configs"][i] for i in (0, 1))
    assert first["attention"]["no_op"] and first["attention"]["n_heads_in_group"] is None
    assert not second["attention"]["no_op"] and second["attention"]["n_heads_in_group"] == 3
    assert int(2 * first["ffn"]["ffn_mult"] * 96 / 3) == 256
    small = AutoModelForCausalLM.from_pretrained(tmp_path / "small", trust_remote_code=True)
    names = [k for k in small.state_dict() if k.startswith("model.layers.0.")]
    assert not any("self_attn" in k or "input_layernorm" in k for k in names)


@pytest.mark.slow
def test_a_pruned_model_generates_and_needs_nothing_of_kvsearch(tiny_tokenizer, tmp_path) -> None:
    loaded, out = made(LlamaConfig, tiny_tokenizer), tmp_path / "small"
    prune(Policy(channels=WORDS["channels"]), loaded, out, progress=False)
    ids = torch.from_numpy(IDS[:, :20])
    kwargs = dict(max_new_tokens=12, do_sample=False, pad_token_id=0)
    policy = Policy(channels=WORDS["channels"])
    cache = PolicyCache(policy, loaded.model, native=torch.float32)
    want = loaded.model.generate(ids, past_key_values=cache, **kwargs)
    code = (
        "import sys, torch; sys.modules['kvsearch'] = None\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        f"m = AutoModelForCausalLM.from_pretrained({str(out)!r}, trust_remote_code=True)\n"
        f"AutoTokenizer.from_pretrained({str(out)!r}, trust_remote_code=True)\n"
        f"ids = torch.tensor({ids.tolist()})\n"
        f"print(m.generate(ids, **{kwargs!r}).tolist())"
    )
    env = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == want.tolist()
    assert (
        AutoTokenizer.from_pretrained(out)("ab")["input_ids"] == tiny_tokenizer("ab")["input_ids"]
    )


def test_an_interrupted_prune_leaves_nothing(tiny_tokenizer, tmp_path: Path, monkeypatch) -> None:
    loaded, out = made(LlamaConfig, tiny_tokenizer), tmp_path / "small"

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    def tokens(*_: object) -> None:
        raise Exception("No space left on device (os error 28)")  # as tokenizers does

    with monkeypatch.context() as patch:
        patch.setattr(type(loaded.tokenizer), "save_pretrained", tokens)
        with pytest.raises(RunError, match=r"cannot write .* No space left on device"):
            prune(Policy(channels=WORDS["layers"]), loaded, out, progress=False)
    for error, kind in ((full, RunError), (lambda *_: sys.exit(9), SystemExit)):
        monkeypatch.setattr("kvsearch.commands.prune.write_atomic", error)
        with pytest.raises(kind):
            prune(Policy(channels=WORDS["layers"]), loaded, out, progress=False)
        assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    (tmp_path / ".small.part").mkdir()  # what a killed process leaves
    (tmp_path / ".small.part" / "model.safetensors").write_bytes(b"half")
    prune(Policy(channels=WORDS["layers"]), loaded, out, progress=False)
    assert list(tmp_path.iterdir()) == [out]
    modes = {(out / name).stat().st_mode for name in ("model.safetensors", "config.json")}
    assert len(modes) == 1


def test_a_folder_that_appears_meanwhile_is_not_touched(
    tiny_tokenizer, tmp_path: Path, monkeypatch
) -> None:
    loaded, out = made(LlamaConfig, tiny_tokenizer), tmp_path / "small"
    monkeypatch.setattr("kvsearch.commands.prune.write_atomic", lambda *_: out.mkdir())
    with pytest.raises(RunError, match="small has appeared meanwhile; move it away"):
        prune(Policy(channels=WORDS["layers"]), loaded, out, progress=False)
    assert list(tmp_path.iterdir()) == [out] and not list(out.iterdir())


@pytest.mark.parametrize("words", [2, 86, 511, 512, 513])
def test_a_short_text_is_measured_as_far_as_it_goes(
    words: int, tiny_tokenizer, tmp_path: Path
) -> None:
    loaded = made(LlamaConfig, tiny_tokenizer)  # whose tokens are bytes
    text = Text(("ab" * 300)[:words], "abab")
    found = prune("kvpruner-l2-50", loaded, tmp_path / "small", text=text, progress=False)
    assert found.parameters < found.parameters_before


def test_what_cannot_be_pruned_is_said_in_one_sentence(
    tiny_folder: Path, tiny_tokenizer, tmp_path: Path, capsys, monkeypatch
) -> None:
    other = made(Qwen3Config, tiny_tokenizer)
    with pytest.raises(ModelError, match=r"prune writes llama, mistral, qwen2 models .* 'qwen3'"):
        prune(Policy(channels=WORDS["layers"]), other, tmp_path / "small", progress=False)
    (tmp_path / "there").mkdir()
    plain = tmp_path / "plain.json"
    plain.write_text(Policy().to_json())
    for args, said in (
        ([str(plain), "--out", str(tmp_path / "there")], "exists already"),
        (["kvprunner-01-20", "--out", str(tmp_path / "small")], "did you mean 'kvpruner-01-20'"),
    ):
        code, _, err = call(["prune", *args, "--model", str(tiny_folder), "--quiet"], capsys)
        assert code == 2 and said in err and err.count("\n") == 1, err
    assert not (tmp_path / "small").exists()
    monkeypatch.setattr("kvsearch.session.load.model", lambda *_, **__: pytest.fail("loads"))
    for policy, out, said in (
        ("kvpruner-l2-50", plain / "small", "is a file, not a folder"),
        ("kvpruner-l2-50", tmp_path / "half\udcff" / "small", "is no name in UTF-8"),
        (plain, tmp_path / "small", "nothing is pruned"),
        ("h2o", tmp_path / "small", "nothing is pruned"),
    ):
        with pytest.raises(KvsearchError, match=said):
            prune(policy, str(tiny_folder), out, progress=False)


def test_a_method_is_measured_pruned_and_runs_again(tiny_folder: Path, tmp_path, capsys) -> None:
    out = tmp_path / "small"
    argv = ["prune", "kvpruner-l2-50", "--model", str(tiny_folder), "--out", str(out), "--json"]
    code, printed, _ = call(argv, capsys)
    assert code == 0
    said = json.loads(printed)
    assert said["parameters"] < said["parameters_before"]
    args = ["--model", str(out), "--context", "200", "--json", "--quiet"]
    code, printed, _ = call(["eval", str(out / "policy.json"), *args], capsys)
    assert code == 0
    (row,) = json.loads(printed)["results"]
    assert row["bytes_asked"] == row["bytes_resident"] == 200 * said["token_bytes"]
