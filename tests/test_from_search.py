"""A policy with ragged heads and bits per layer, from a search through its file to `generate()`."""

import csv
from pathlib import Path

import pytest
import torch

from kvsearch.cache import PolicyCache
from kvsearch.cli import main
from kvsearch.models.load import load_model
from kvsearch.policy import Policy, layout

SPACE = """
version: 2
name: ragged
axes:
  rule: {choice: [xmu]}
  tiers: {choice: [k4v4]}
  bits: {choice: [layer]}
  budgets: {choice: [heads]}
  exponent: {float: [0.4, 1.0]}
  interval: {choice: [8]}
  sinks: {choice: [4]}
"""
CONTEXT, NEW = 256, 40


@pytest.fixture(scope="module")
def folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run over policies of that kind only."""
    place = tmp_path_factory.mktemp("ragged")
    space, text, model = place / "space.yaml", place / "text.txt", place / "model"
    space.write_text(SPACE)
    words = "the cache keeps what the next token will want to look at again and again".split()
    text.write_text(" ".join(words[(i * i + 3 * i) % len(words)] for i in range(2000)))
    loaded = load_model(str(tiny_folder), device="cpu")
    with torch.no_grad():
        for weight in loaded.model.parameters():
            if weight.dim() > 1:
                weight.mul_(4)  # a flat random model attends to everything alike
        loaded.model.model.layers[1].self_attn.v_proj.weight[:8] /= 16  # a head of little use
    loaded.model.save_pretrained(model)
    loaded.tokenizer.save_pretrained(model)
    with pytest.raises(SystemExit) as done:
        main(
            ["run", "--model", str(model), "--text", str(text), "--space", str(space),
             "--budget", "64", "--context", str(CONTEXT), "--trials", "2", "--no-warm-start",
             "--no-bench", "--out", str(place / "run"), "--quiet"],
        )  # fmt: skip
    assert not done.value.code
    return place


def test_it_generates_with_the_bytes_that_the_report_states(folder: Path) -> None:
    loaded = load_model(str(folder / "model"), device="cpu")
    best = Policy.from_json(folder / "run" / "best.json")
    cache = PolicyCache.from_json(folder / "run" / "best.json", loaded.model)
    parts = layout(best, loaded.shape).layers
    layers = [{part.slots for part in parts if part.layer == i} for i in (0, 1)]
    assert max(map(len, layers)) > 1, "heads of one layer have their own slots"
    assert len({part.policy.tiers for part in parts}) > 1, "layers have their own bits"
    ids = torch.randint(3, 250, (1, CONTEXT - NEW + 1), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        out = loaded.model.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=cache, do_sample=False,
            max_new_tokens=NEW, min_new_tokens=NEW, pad_token_id=0,
        )  # fmt: skip
    assert out.shape[1] == CONTEXT + 1 and cache.get_seq_length() == CONTEXT
    with (folder / "run" / "front.csv").open() as lines:
        (row,) = [r for r in csv.DictReader(lines) if r["name"] == best.name]
    assert cache.bytes_resident == int(row["bytes_resident"])
    assert cache.bytes_resident <= int(row["bytes_peak"]) == best.about["bytes_peak"]
    assert int(row["bytes_peak"]) <= loaded.shape.budget_bytes(64)
