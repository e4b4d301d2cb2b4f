"""Sensitivity is measured as finely and on as many windows as a search can pay for."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvsearch.app.sensitivity import measure, read
from kvsearch.errors import KvsearchError, OutOfMemory
from kvsearch.evaluate import sensitivity
from kvsearch.evaluate.quality import Evaluator
from kvsearch.evaluate.sensitivity import Plan
from kvsearch.models.head import Head
from kvsearch.models.load import LoadedModel, load_model
from kvsearch.policy import ModelShape, Policy


@pytest.fixture
def tiny(tiny_folder) -> LoadedModel:
    return load_model(str(tiny_folder), device="cpu")


@pytest.mark.parametrize(
    ("search_tokens", "layers", "context", "plan"),
    [
        (30_720, 30, 1536, Plan(10, 1, 512)),
        (100_000, 30, 1024, Plan(30, 1, 625)),
        (300_000, 30, 4096, Plan(30, 1, 1875)),
        (300_000, 30, 1024, Plan(30, 1, 1024)),
        (700_000, 30, 4096, Plan(30, 2, 2048)),
        (10_000_000, 30, 4096, Plan(30, 4, 2048)),
        (10_000_000, 4, 512, Plan(4, 4, 512)),
        (0, 4, 512, Plan(4, 1, 512)),
    ],
)
def test_measuring_costs_at_most_a_tenth_of_a_search_but_is_never_too_coarse(
    search_tokens: int, layers: int, context: int, plan: Plan
) -> None:
    assert sensitivity.plan(search_tokens, layers, context) == plan


@pytest.mark.parametrize("room", [500, 90])
def test_where_memory_is_short_fewer_tokens_are_measured(tiny, monkeypatch, room: int) -> None:
    """Until a window is too short to say anything."""
    asked: list[int] = []

    def measured(_evaluator: Any, ids: np.ndarray, *_: Any) -> tuple[float, ...]:
        asked.append(ids.shape[-1])
        if asked[-1] > room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return (1.0, 1.0)

    monkeypatch.setattr(sensitivity, "kept_or_measured", measured)
    ids, wanted = np.zeros((4, 1024), np.int64), frozenset({"layers"})
    step = lambda *_: nullcontext()  # noqa: E731
    if room == 500:
        found = measure(Evaluator(tiny), ids, wanted, 1 << 30, step)
        assert found.layers == (1.0, 1.0) and asked == [1024, 512, 256]
        return
    with pytest.raises(OutOfMemory, match=r"cannot be measured on 128 tokens: CUDA out of memory"):
        measure(Evaluator(tiny), ids, wanted, 1 << 30, step)
    assert asked == [1024, 512, 256, 128]


def test_divergence_is_the_textbook_sum_across_slices(tiny, monkeypatch) -> None:
    monkeypatch.setattr("kvsearch.models.head.ROWS", 3)
    head, gen = Head(tiny.model), torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 2, 7, 32, generator=gen)
    with torch.inference_mode():
        found = head.divergence(head.expected(a), b)
        p, q = (head.logits(x).softmax(-1).double() for x in (a, b))
    torch.testing.assert_close(found.double(), (p * (p / q).log()).sum(-1), rtol=1e-3, atol=1e-6)
    assert (found > 0).all() and not head.divergence(head.expected(a), a).any()


def test_a_layer_without_values_is_the_least_harmed(tiny) -> None:
    """Values of layer 1 are all zero, so whatever it forgets makes no difference."""
    with torch.no_grad():
        tiny.model.model.layers[1].self_attn.v_proj.weight.zero_()
    ids, steps, tokens = np.random.default_rng(0).integers(0, 256, (2, 160)), [], []
    projection = tiny.model.model.layers[0].self_attn.q_proj
    projection.register_forward_hook(lambda _, given, __: tokens.append(given[0].shape[1]))
    first, second = sensitivity.measure(
        Evaluator(tiny), ids, groups=2, progress=lambda: steps.append(1)
    )
    assert first > 1.9 and 0 < second < 2 * sensitivity.LEAST
    assert len(steps) == 4  # two groups on two windows
    assert tokens.count(160) == 4  # layer 0: the full cache and its own group, not layer 1's


def test_starting_at_the_starved_layer_gives_the_same_and_leaves_the_model_as_it_was(
    tiny, monkeypatch
) -> None:
    ids = np.random.default_rng(0).integers(0, 256, (1, 160))
    evaluator = Evaluator(tiny)
    divergence = evaluator.divergence(ids)
    assert divergence.spent == 160
    policy = sensitivity.starving([1], 2, 32, 160)
    short = divergence.of(policy, same=1)
    assert divergence.spent == 240
    whole = divergence.of(policy)
    np.testing.assert_allclose(short, whole, atol=1e-6)
    assert short[:, :32].max() < 1e-6 and short[:, 32:].max() > 1e-5
    assert np.abs(divergence.of(Policy())).max() < 1e-6
    np.testing.assert_array_equal(evaluator.divergence(ids).of(policy), whole)
    tokens: list[int] = []  # that went through the output layer, slice by slice
    tiny.model.lm_head.register_forward_hook(lambda _, __, out: tokens.append(out.shape[1]))
    for held, times in ((1 << 28, 3), (0, 4)):  # in a long window, predictions are made again
        monkeypatch.setattr("kvsearch.evaluate.divergence.HELD", held)
        tokens.clear()
        again = evaluator.divergence(ids)
        for _ in range(2):
            np.testing.assert_array_equal(again.of(policy), whole)
        assert sum(tokens) == times * 160


HEADS = {
    "heads": 2, "sizes": [4, 8], "slots": [[0.2, 0.1]] * 4, "bits": [4, 2],
    "keys": [[0.1, 0.2]] * 4, "values": [[0.1, 0.2]] * 4, "starved": 4, "measured": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("[1, 2]", "is no sensitivity.json of a run"),
        ("[" * 100_000, "is no sensitivity.json of a run"),
        ('{"per_layer": [1' + "0" * 5000 + ", 1]}", "is no sensitivity.json of a run"),
        ({"per_layer": [1, 2, 3]}, "one number above 0 for each of the model's 2 layers"),
        ({"per_layer": [1e308, 1]}, "one number above 0"),
        ({"per_layer": [1e-320, 1]}, "one number above 0"),
        ({"per_layer": [], "heads": {**HEADS, "slots": [[float("nan"), 1]] * 4}}, "is not finite"),
        ({"per_layer": [], "heads": {**HEADS, "values": [[1e308, 1e308]] * 4}}, "is not finite"),
        ({"per_layer": [], "heads": {**HEADS, "sizes": [4]}}, "rows of unequal length"),
    ],
)
def test_a_file_of_something_else_is_one_sentence(data: Any, said: str, tmp_path: Path) -> None:
    file, shape = tmp_path / "sensitivity.json", ModelShape(2, 2, 8, 4)
    file.write_text(data if isinstance(data, str) else json.dumps(data))
    with pytest.raises(KvsearchError, match=said) as error:
        read(file, shape)
    assert "\n" not in str(error.value) and str(file) in str(error.value)
    file.write_text(json.dumps({"per_layer": [0.5, 1.5], "heads": HEADS}))
    assert read(file, shape).layers == (0.5, 1.5)
