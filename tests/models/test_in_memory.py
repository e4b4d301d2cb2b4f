"""Models in memory: what is evaluated, what is refused when given; tokens that a model lacks."""

import tempfile
import warnings
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import numpy as np
import peft
import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM

import kvsearch
from kvsearch import LoadedModel, Policy, Text
from kvsearch.commands.adapt import adapt
from kvsearch.commands.export import export
from kvsearch.commands.prune import prune
from kvsearch.errors import ModelError
from kvsearch.evaluation.evaluator import Evaluator, stepwise
from kvsearch.policy import Anchors
from kvsearch.policy.anchors import NEW

IDS = (np.arange(96, dtype=np.int64) ** 2 % 251)[None]
SMALL = Policy(slots=40, sinks=4, interval=8, positions="cache")
LORA = dict(task_type="CAUSAL_LM", r=4)
PLAIN = "the quick brown fox. " * 200
BEYOND = PLAIN + "<new>" + PLAIN


@pytest.fixture
def plain(tiny_folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_folder)


def adapted(model: Any, config: Any, **more: Any) -> Any:
    """With numbers in the adapter that change what the model computes."""
    made = peft.get_peft_model(model, config, **more)
    torch.manual_seed(1)
    for name, x in made.named_parameters():
        if x.requires_grad and "base" not in name.rpartition(".base_layer.")[1]:
            x.data.add_(0.1 * torch.randn_like(x))
    return made


def quantised(model: Any, **more: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, **more)


def layers_compiled(model: Any) -> Any:
    model.model.layers = nn.ModuleList(
        torch.compile(x, backend="eager") for x in model.model.layers
    )
    return model


EVALUATED: dict[str, Callable[[Any], Any]] = {
    "LoRA": lambda m: adapted(m, peft.LoraConfig(**LORA, target_modules=["q_proj", "lm_head"])),
    "LoRA of embeddings": lambda m: adapted(
        m,
        peft.LoraConfig(**LORA, target_modules=["embed_tokens"], modules_to_save=["lm_head"]),
    ),
    "LoRA without a task": lambda m: adapted(m, peft.LoraConfig(target_modules=["q_proj"])),
    "LoRA, mixed": lambda m: adapted(m, peft.LoraConfig(target_modules=["v_proj"]), mixed=True),
    "IA3": lambda m: adapted(m, peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[])),
    "adaption prompt": lambda m: adapted(
        m, peft.AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=4, adapter_layers=2)
    ),
    "quantised": quantised,
    "quantised to fp16": lambda m: quantised(m, dtype=torch.float16),
    "DataParallel": nn.DataParallel,
    "compiled": lambda m: torch.compile(m),
    "compiled LoRA": lambda m: torch.compile(
        adapted(m, peft.LoraConfig(**LORA, target_modules=["q_proj"]))
    ),
    "compiled layers": layers_compiled,
    "training": lambda m: m.train(),
    "offloaded": lambda m: accelerate.cpu_offload(m, torch.device("cpu")),
    "offloaded to disk": lambda m: accelerate.disk_offload(
        m, tempfile.mkdtemp(), torch.device("cpu"), offload_buffers=True
    ),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[pytest.mark.slow] * ("compiled" in k)) for k in EVALUATED]
)
def test_what_generates_is_evaluated_as_it_computes(kind: str, plain: Any) -> None:
    given = EVALUATED[kind](deepcopy(plain))
    loaded = LoadedModel.of(given, None)
    own = Evaluator(loaded).quality(Policy(), IDS).nll
    inner = getattr(given, "module", getattr(given, "_orig_mod", given)).eval()
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        rows = inner(input_ids=torch.from_numpy(IDS)).logits.float().log_softmax(-1)
    want = -rows[0, :-1].gather(-1, torch.from_numpy(IDS[0, 1:, None]))[:, 0].numpy()
    rounded = kind.startswith("quantised")  # whose activations are rounded call by call
    assert np.abs(own[0] - want).max() < (0.05 if rounded else 2e-3)
    changed = "LoRA" in kind or kind in ("IA3", "adaption prompt", "quantised")
    same = np.allclose(own, Evaluator(LoadedModel.of(plain, None)).quality(Policy(), IDS).nll)
    assert not (same and changed)
    if kind.startswith("offloaded"):
        assert same and loaded.digest == LoadedModel.of(plain, None).digest
    evicts = Evaluator(loaded).quality(SMALL, IDS).nll
    deployed, _ = stepwise(loaded, SMALL, IDS)
    assert np.abs(evicts - deployed).max() < (0.05 if rounded else 1e-4)


def wrapped(model: Any) -> nn.Module:
    outer = nn.Module()
    outer.policy = nn.ModuleList([model])
    return outer


def autocast(model: Any) -> Any:
    """As accelerate prepares a model for mixed precision."""
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    return model


def t5(_: Any) -> Any:
    sizes = dict(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))


VIRTUAL = dict(task_type="CAUSAL_LM", num_virtual_tokens=3)
REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "prompt tuning": (
        lambda m: adapted(m, peft.PromptTuningConfig(**VIRTUAL)),
        "PROMPT_TUNING, which puts virtual tokens",
    ),
    "P-tuning": (lambda m: adapted(m, peft.PromptEncoderConfig(**VIRTUAL)), "type P_TUNING"),
    "prefix": (lambda m: adapted(m, peft.PrefixTuningConfig(**VIRTUAL)), "type PREFIX_TUNING"),
    "activated LoRA": (
        lambda m: adapted(
            m,
            peft.LoraConfig(**LORA, target_modules=["q_proj"], alora_invocation_tokens=[5, 6]),
        ),
        "activated LoRA adapter",
    ),
    "poly": (
        lambda m: adapted(
            m,
            peft.PolyConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], n_tasks=2),
        ),
        "type POLY, with which it cannot be called",
    ),
    "wrapper": (wrapped, "give the LlamaForCausalLM inside it, its attribute 'policy.0'"),
    "pipeline": (lambda m: SimpleNamespace(model=m), "inside it, its attribute 'model'"),
    "name": (lambda m: "smollm2-135m", "kvsearch.load_model"),
    "none": (lambda m: None, "load one with AutoModelForCausalLM"),
    "body": (lambda m: m.model, "LlamaModel does not generate text"),
    "encoder": (t5, "has an encoder and a decoder"),
    "nowhere": (lambda m: m.to("meta"), "on the device .meta., so nowhere"),
    "mixed precision": (autocast, "its forward was replaced, as for mixed precision"),
    "no output layer": (
        lambda m: setattr(m, "get_output_embeddings", lambda: None) or m,
        "no body and output layer apart",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_evaluated_is_refused_when_it_is_given(kind: str, plain: Any) -> None:
    make, part = REFUSED[kind]
    with pytest.raises(ModelError, match=part) as caught:
        LoadedModel.of(make(plain), None)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize("kind", ["LoRA", "quantised"])
def test_training_and_pruning_need_plain_weights(
    kind: str, plain: Any, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    mine, out = LoadedModel.of(EVALUATED[kind](plain), tiny_tokenizer), tmp_path / "out"
    part = "merge_and_unload" if kind == "LoRA" else "is quantised; load it without"
    with pytest.raises(ModelError, match=part):
        adapt(SMALL, mine, Text(PLAIN), out, context=64, progress=False)
    with pytest.raises(ModelError, match=part):
        prune("kvpruner-01-20", mine, out, progress=False)
    assert not list(tmp_path.iterdir())


# -- tokens that a model lacks -------------------------------------------------------------------


@pytest.fixture(scope="module")
def larger(tiny_folder: Path, tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder whose tokenizer has one token that the model has not."""
    tokenizer, folder = deepcopy(tiny_tokenizer), tmp_path_factory.mktemp("larger")
    tokenizer.add_tokens(["<new>"])
    AutoModelForCausalLM.from_pretrained(tiny_folder).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "beyond.txt").write_text(BEYOND)
    (folder / "plain.txt").write_text(PLAIN[::-1])
    return folder


SIZE: dict[str, Any] = dict(budget_slots=40)
WHERE: dict[str, Callable[[LoadedModel, Any, Path], object]] = {
    "evaluate": lambda m, x, out: kvsearch.evaluate("h2o", m, x, context=128, **SIZE),
    "search": lambda m, x, out: kvsearch.search(m, x, context=128, out=out, **SIZE),
    "search, report": lambda m, x, out: kvsearch.search(
        m, Text(PLAIN[::-1]), report_text=x, context=128, out=out, **SIZE
    ),
    "search, extra": lambda m, x, out: kvsearch.search(
        m, Text(PLAIN[::-1]), extra_text=x, context=128, out=out, **SIZE
    ),
    "bench": lambda m, x, out: kvsearch.bench("h2o", m, x, context=128, **SIZE),
    "adapt": lambda m, x, out: adapt(SMALL, m, x, out, context=64, progress=False),
    "adapt, held out": lambda m, x, out: adapt(
        SMALL, m, Text(PLAIN[::-1]), out, held_out=x, context=64, progress=False
    ),
    "export": lambda m, x, out: export(
        SMALL, "transformers", out, model=m, text=x, context=128, progress=False
    ),
    "prune": lambda m, x, out: prune("kvpruner-01-20", m, out, text=x, progress=False),
    "given ids": lambda m, x, out: Evaluator(m).quality(SMALL, np.full((1, 64), 257)),
    "divergence": lambda m, x, out: Evaluator(m).divergence(np.full((1, 64), 257)),
}


@pytest.mark.parametrize("where", WHERE)
def test_tokens_that_the_model_lacks_are_told_before_any_is_evaluated(
    where: str, larger: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = kvsearch.load_model(str(larger), announce=lambda _: None)

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("tokens were evaluated")

    monkeypatch.setattr("kvsearch.models.head.Head.hidden", never)
    said = r"token 257 .*tokenizer with 258, .* has 257 tokens.*resize_token_embeddings\(258\)"
    with pytest.raises(ModelError, match=said):
        WHERE[where](loaded, Text(BEYOND), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_tokenizer_may_have_tokens_that_no_text_has(larger: Path) -> None:
    loaded = kvsearch.load_model(str(larger), announce=lambda _: None)
    found = kvsearch.evaluate("h2o", loaded, Text(PLAIN), context=128, **SIZE)
    assert found.rows


def test_the_token_of_inserted_anchors_is_looked_for_too(plain: Any, tiny_tokenizer: Any) -> None:
    tokenizer = deepcopy(tiny_tokenizer)
    tokenizer.add_tokens([NEW])
    loaded = LoadedModel.of(plain, tokenizer)
    assert kvsearch.evaluate("h2o", loaded, Text(PLAIN), context=128, **SIZE).rows
    inserts = Policy(anchors=Anchors(at=16, insert=True), name="inserts")
    with pytest.raises(ModelError, match="inserted anchors has token 257"):
        kvsearch.evaluate(inserts, loaded, Text(PLAIN), context=128)


def test_a_tokenizer_of_another_model_is_noticed_by_its_size(
    tiny_folder: Path, tiny_tokenizer: Any
) -> None:
    config = transformers.AutoConfig.from_pretrained(tiny_folder)
    sized = {n: deepcopy(config) for n in (272, 400)}
    for n, c in sized.items():
        c.vocab_size = n
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        LoadedModel.of(AutoModelForCausalLM.from_config(sized[272]), tiny_tokenizer)  # padded
    with pytest.warns(RuntimeWarning, match="the tokenizer has 257 tokens and the model 400"):
        LoadedModel.of(AutoModelForCausalLM.from_config(sized[400]), tiny_tokenizer)
