"""Decode time: measured in pairs of unequal length, and modelled with its error."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch

from kvsearch.cache.cuda import graphs
from kvsearch.errors import ModelError
from kvsearch.evaluation import decode_speed, throughput
from kvsearch.models.load import load_model
from kvsearch.policy import ModelShape, Policy
from kvsearch.policy_space import Setting
from kvsearch.policy_space.methods import at
from kvsearch.report.terminal import bench_lines

SHAPE = ModelShape(layers=4, kv_heads=2, head_dim=16, heads=6)
SETTING = Setting(SHAPE, SHAPE.budget_bytes(160), 1024)
NAMES = ("streamingllm", "h2o", "window+int4", "h2o+int4", "xmu")


def test_work_counts_what_is_held() -> None:
    fixed, read, unpack, move, score = decode_speed.work(Policy(), SHAPE, 1000)
    assert (fixed, unpack, move, score) == (1, 0, 0, 0)
    assert read == 1000 * 2 * 2 * 16 * 4  # keys and values, KV heads, channels, layers
    window = Policy(slots=101, interval=1)
    assert decode_speed.work(window, SHAPE, 1000)[1] == 101 * 2 * 2 * 16 * 4
    assert decode_speed.work(at("window+int4", SETTING), SHAPE, 1000)[2] > 0


def test_fit_finds_the_costs_of_a_machine_that_follows_the_model() -> None:
    true = np.array([2e-2, 3e-9, 2e-8, 1e-9, 5e-9])
    policies = [at(n, SETTING) for n in NAMES]

    def measure(policy: Policy) -> tuple[float, float]:
        return tuple(float(true @ decode_speed.work(p, SHAPE, 1000)) for p in (policy, Policy()))

    model = decode_speed.fit(policies, measure, SHAPE, 1000)
    assert model.error < 1e-6 and model.probes == len(NAMES)
    assert model.seconds == pytest.approx(true, rel=1e-3)
    faster, slower = at("streamingllm", SETTING), at("h2o+int4", SETTING)
    assert model.ratio(faster) > 1 > model.ratio(slower)


def test_a_machine_that_does_not_follow_it_shows_in_the_error() -> None:
    rng = np.random.default_rng(0)
    policies = [at(n, SETTING) for n in NAMES]
    model = decode_speed.fit(policies, lambda p: tuple(rng.uniform(0.01, 0.1, 2)), SHAPE, 1000)
    assert model.error > 0.1 and min(model.seconds) >= 0


def test_rates_do_not_depend_on_how_many_tokens_a_half_has(tiny_folder, monkeypatch) -> None:
    """The policy takes 10 ms a token and the full cache 20, which decodes fewer of them."""
    loaded, tokens = load_model(str(tiny_folder), device="cpu"), {True: 0, False: 0}

    def decode(_, cache, part) -> float:
        mine = hasattr(cache, "policy") and cache.policy.slots is not None
        tokens[mine] += part.shape[1]
        return (0.01 if mine else 0.02) * part.shape[1]

    monkeypatch.setattr(throughput, "_decode", decode)
    ids = np.arange(300) % 250
    found = throughput.measure(
        loaded, Policy(slots=64, interval=16), ids, context=100, pairs=3, steps=64
    )
    assert tokens == {True: 4 + 3 * 64, False: 4 + 3 * 16}
    assert (found.tokens_per_s, found.full_tokens_per_s) == pytest.approx((100.0, 50.0))
    assert (found.ratio, found.ratio_lo, found.ratio_hi) == pytest.approx((2.0, 2.0, 2.0))


def test_speed_with_cuda_graphs_says_how_many_tokens_were_replays(tiny_folder, monkeypatch) -> None:
    loaded, ids = load_model(str(tiny_folder), device="cpu"), np.arange(300) % 250
    policy = Policy(slots=64, interval=16)
    with pytest.raises(ModelError, match=r"needs a model on one GPU.* on cpu"):
        throughput.measure(loaded, policy, ids, context=100, graphs=True)
    for module in (throughput, graphs):  # here nothing can be replayed all the same
        monkeypatch.setattr(module, "serves", lambda model: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    found = throughput.measure(loaded, policy, ids, context=100, pairs=2, steps=16, graphs=True)
    assert (found.replayed, found.full_replayed) == (0, 0)

    decoded = graphs.Decoded()

    def decode(_, cache, part) -> float:  # all of the policy's tokens are replays, half of others
        mine = getattr(cache, "policy", Policy()).slots is not None
        decoded.repeated += part.shape[1] // (1 if mine else 2)
        return 0.01

    monkeypatch.setattr(throughput, "_decode", decode)
    monkeypatch.setattr(throughput, "cuda_graphs", lambda model: nullcontext(decoded))
    found = throughput.measure(loaded, policy, ids, context=100, pairs=2, steps=16, graphs=True)
    assert (found.replayed, found.full_replayed) == (1, 0.5)
    assert "graph: 100 % of the policy's tokens, 50 % of the full" in bench_lines("x", found)
    assert throughput.measure(loaded, policy, ids, context=100, pairs=2).replayed is None
