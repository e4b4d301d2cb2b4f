"""A model on a GPU: the evaluator replays what the deployed cache does, and the main job ends."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from kvsearch.cache import PolicyCache
from kvsearch.cache.cuda.graphs import cuda_graphs
from kvsearch.cli import main
from kvsearch.evaluation.evaluator import Evaluator, stepwise
from kvsearch.models.load import LoadedModel
from tests.cache.test_device import NAMES, small
from tests.cache_cases import PROMPT, T, tiny
from tests.gpu.layers import GPU

# what falls back would give the same
pytestmark = pytest.mark.filterwarnings("error:(auto passes over|no CUDA graphs)")
NAMED = [n for n in NAMES if small(n).anchors is None]  # these ask the tokenizer
IDS = np.random.default_rng(0).integers(0, 97, size=(2, T))


def placed(dtype: torch.dtype) -> LoadedModel:
    """The tiny model, with heads that kernels take."""
    loaded = tiny(dtype=dtype, head_dim=64)
    return replace(loaded, model=loaded.model.to(GPU), device=str(GPU))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMED)
def test_one_pass_equals_token_by_token(name: str, dtype: torch.dtype) -> None:
    """In fp64 without kernels, exactly; in other types what rounding allows, on the mean."""
    loaded, policy = placed(dtype), small(name)
    prompt = PROMPT if policy.trigger != "stream" else 1
    ids = IDS[:1] if policy.budgets.kind == "adakv" else IDS
    slow, cache = stepwise(loaded, policy, ids, prompt=prompt)
    quality = Evaluator(loaded, batch=2).quality(policy, ids, prompt=prompt)
    each, mean = np.abs(slow - quality.nll).max(), float((slow - quality.nll).mean())
    print(f"replay {name} {dtype}: most {each:.2g}, mean {mean:.2g}, {quality.impls}")
    if dtype is torch.float64:
        assert each < 1e-5
    else:
        assert abs(mean) < (1e-3 if dtype is torch.float32 else 0.05)
    assert cache.bytes_resident == quality.bytes_resident


GRAPHED = ("full", "window+int4", "h2o+int4", "xmu+int4", "keydiff", "rotated+heads")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", GRAPHED)
def test_replayed_tokens_are_those_that_are_computed(name: str, dtype: torch.dtype) -> None:
    """Of a whole model, across compactions; the same kernels run, so they are the same numbers."""
    model, policy, ids = placed(dtype).model, small(name), torch.from_numpy(IDS).to(GPU)
    outs, caches = [], []
    for graphs in (False, True):
        cache = PolicyCache(policy, model)
        with torch.no_grad(), cuda_graphs(model) if graphs else nullcontext() as tokens:
            model(ids[:, :PROMPT], past_key_values=cache)
            calls = (model(x, past_key_values=cache).logits for x in ids[:, PROMPT:].split(1, 1))
            outs.append(torch.cat([x.float() for x in calls], 1))
        caches.append(cache)
    off = float((outs[0] - outs[1]).abs().max())
    print(f"replays {name} {dtype}: {tokens}, most {off:.2g}")
    assert tokens.repeated > 0.8 * (T - PROMPT)
    assert off <= 1e-4 * float(outs[0].abs().max())
    assert caches[0].bytes_resident == caches[1].bytes_resident


def test_generate_replays_tokens() -> None:
    """As a user calls it, with a mask and sampling; and the model is as it was."""
    model, ids = placed(torch.bfloat16).model, torch.from_numpy(IDS[:, :PROMPT]).to(GPU)
    outs = []
    for context in (nullcontext(), cuda_graphs(model)):
        torch.manual_seed(0)
        cache = PolicyCache(small("h2o+int4"), model)
        with context:
            outs.append(model.generate(
                ids, attention_mask=torch.ones_like(ids), past_key_values=cache, do_sample=True,
                max_new_tokens=60, min_new_tokens=60, pad_token_id=0,
            ))  # fmt: skip
    assert torch.equal(*outs)
    assert "forward" not in model.__dict__


def test_the_main_job_ends(
    tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast, capsys: pytest.CaptureFixture[str],
    recwarn: pytest.WarningsRecorder,
) -> None:  # fmt: skip
    config = LlamaConfig(
        vocab_size=257, hidden_size=128, intermediate_size=128, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=4096,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    text = tmp_path / "text.txt"
    words = np.random.default_rng(0).integers(0, 400, 40_000)
    text.write_text(" ".join(f"w{w}." for w in words))
    args = ["run", "--model", str(tmp_path / "model"), "--text", str(text), "--budget", "128"]
    args += ["--context", "512", "--trials", "12", "--out", str(tmp_path / "run")]
    with pytest.raises(SystemExit) as ended:
        main(args)
    out = capsys.readouterr()
    assert not ended.value.code, out.err[-3000:]
    failed = [str(w.message) for w in recwarn if "passes over" in str(w.message)]
    assert not failed  # kernels that failed their probes
    for file in ("front.csv", "best.json", "study.json", "report.html"):
        assert (tmp_path / "run" / file).stat().st_size > 0
