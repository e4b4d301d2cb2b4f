"""Defects that a review found, each with the test that would have caught it."""

from types import SimpleNamespace

import pytest
import torch

from kvsearch.cache import PolicyCache
from kvsearch.cache.layer import Layer, empty_layers
from kvsearch.cache.ways import advance
from kvsearch.errors import PolicyError
from kvsearch.evaluation.evaluator import Evaluator
from kvsearch.models.load import LoadedModel
from kvsearch.policy import ModelShape, Policy, Tier
from kvsearch.policy_search import model_worker
from kvsearch.policy_space.methods import at
from kvsearch.rules import Attention
from kvsearch.rules.attention import AttentionScorer
from tests.cache_cases import AFTER, IDS

SHAPE = ModelShape(layers=4, kv_heads=2, head_dim=16, heads=6)
K4 = (Tier(key_bits=4, value_bits=4),)


def stream(layer: Layer, calls: list[int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    total = sum(calls)
    q, k, v = (
        torch.randn(1, h, total, 16, generator=draw, dtype=torch.float64).to(dtype)
        for h in (SHAPE.heads, SHAPE.kv_heads, SHAPE.kv_heads)
    )
    outs, done = [], 0
    for m in calls:
        part = slice(done, done + m)
        outs.append(advance(layer, *(x[:, :, part] for x in (q, k, v)), scale=0.25))
        done += m
    return torch.cat(outs, 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_16_bit_models_are_finite_and_those_of_deployment(dtype: torch.dtype) -> None:
    """Row weights up to 90,000 do not fit fp16; replay and deployment both add in fp32."""
    policy = Policy(slots=240, interval=16, recent_window=16, rule=Attention(alpha=2))
    one, other = (empty_layers(policy, SHAPE, packed=x, native=dtype)[0] for x in (False, True))
    a, b = stream(one, [330], dtype), stream(other, [1] * 330, dtype)
    (replay,), (deployed,) = one.groups, other.groups
    assert isinstance(replay.scorer, AttentionScorer)
    assert isinstance(deployed.scorer, AttentionScorer)
    assert replay.scorer.sums.isfinite().all() and replay.scorer.sums.max() > 65_504
    early = slice(0, 200)  # before the first eviction, whose close calls rounding may turn
    assert (a[:, :, early] - b[:, :, early]).abs().max() < 0.02
    mean = replay.scorer.sums.mean() / deployed.scorer.sums.mean()
    assert mean == pytest.approx(1, abs=0.01)


def test_a_policy_that_waits_for_a_prompt_is_refused_without_one(loaded: LoadedModel) -> None:
    """It would never have evicted: the whole window counted as its prompt, at no loss."""
    policy = at("snapkv-prompt", AFTER)
    with pytest.raises(PolicyError, match="trigger"):
        Evaluator(loaded).quality(policy, IDS, prompt=0)


def test_a_deployed_layer_holds_no_table_of_angles(loaded: LoadedModel) -> None:
    """Tables of float64 cosines per layer weighed twenty times what the policy held."""
    cache = PolicyCache(Policy(slots=40, sinks=4, interval=8, positions="cache"), loaded.model)
    with torch.inference_mode():
        loaded.model(torch.from_numpy(IDS[:1]), past_key_values=cache)
        loaded.model(torch.from_numpy(IDS[:1, :9]), past_key_values=cache)
    rotaries = {id(s.rotary): s.rotary for s in cache.groups}
    assert len(rotaries) == 1 and all(r is not None and r._slots is None for r in rotaries.values())


def test_each_process_sets_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device, whatever its tensors say."""
    chosen: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(model_worker, "load_model", lambda *_, **k: SimpleNamespace(model=None))
    monkeypatch.setattr(model_worker, "Evaluator", lambda *_: None)
    work = model_worker.ModelWork("m", "auto", ("cuda:0", "cuda:1"), {})
    for slot in range(3):
        work.open(slot)
    assert chosen == ["cuda:0", "cuda:1", "cuda:0"]
