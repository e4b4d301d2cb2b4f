"""The conformance kit: our runtime and a reader in plain Python give what it says."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from kvsearch.cache.huggingface import PolicyCache
from kvsearch.cache.ways import advance
from kvsearch.errors import PolicyError
from kvsearch.evaluation.evaluator import Evaluator
from kvsearch.models.load import LoadedModel
from kvsearch.policy import ModelShape, Policy
from kvsearch.vectors import kit
from tests.command import call
from tests.random_policies import policies
from tests.vectors_reader import Kit, arrays, encode, half, pack

FOUR: dict[str, Any] = dict(tiers=[dict(key_bits=4, value_bits=4)])
SCORED = dict(slots=28, interval=4, sinks=2, recent_window=4)
POLICIES: dict[str, dict[str, Any]] = {
    "window": dict(slots=24, sinks=2, interval=4),
    "window re-indexed, 8 and 2 bits": dict(
        slots=24, sinks=3, positions="cache", tiers=[dict(key_bits=8, value_bits=2)],
        quantizer=dict(group=16),
    ),
    "sums over age in 4 bits": dict(
        **SCORED, **FOUR, rule=dict(name="attention", alpha=1, beta=1),
        quantizer=dict(group=8, fp16_sinks=True),
    ),
    "layers vote after a prompt": dict(
        **SCORED, rule=dict(name="attention", share="layer"), trigger="prompt+stream",
    ),
    "heads of different sizes, 3 bits": dict(
        **SCORED, tiers=[dict(key_bits=3, value_bits=3)], quantizer=dict(group=8),
        rule=dict(name="attention", alpha=1, beta=1),
        budgets=dict(kind="sensitivity", exponent=1.0, weights=((1, 2), (3, 2))),
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=POLICIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place: Path = tmp_path_factory.mktemp("kit")
    for name, content in kit(Policy.build(POLICIES[request.param])).items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_bytes(content)
    return place


def test_plain_python_holds_the_same_bytes(folder: Path) -> None:
    """From the queries, keys and values given: slots and bytes to the bit."""
    seen = set()
    for name, off in Kit(folder).replay_caches():
        assert off < (1e-5 if name.startswith("output") else 0.5), (name, off)
        seen.add(name.rsplit(".", 1)[-1])
    assert {"kept", "codes", "compactions"} <= seen


def test_plain_python_gives_the_same_logits(folder: Path) -> None:
    """From the tokens: a key that rounds to another fp16 number may move a logit a little."""
    for name, off in Kit(folder).replay_model():
        assert off < (2e-3 if name == "logits" else 0.5), (name, off)


def test_our_runtime_gives_what_the_kit_says(folder: Path) -> None:
    """The one-pass replay, which did not write the kit, and the caches on what they are given."""
    manifest = json.loads((folder / "vectors.json").read_text(encoding="utf-8"))
    found = Kit(folder).arrays
    model = _model(folder)
    policy = Policy.build(manifest["policy"])
    ids, logits = torch.tensor(found["ids"]), torch.tensor(found["logits"])
    nll = torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="none")
    loaded = LoadedModel.of(model, None)
    got = Evaluator(loaded).quality(policy, ids[None].numpy(), prompt=manifest["prompt"])
    assert torch.allclose(torch.from_numpy(got.nll[0]), nll, atol=2e-3)
    cache = PolicyCache(policy, model, native=torch.float16)
    for i, layer in enumerate(cache.layers):
        q = torch.tensor(found[f"layer.{i}.query"]).transpose(0, 1)[None]
        mine = [n for n, p in enumerate(manifest["parts"]) if p["layer"] == i]
        k, v = (
            torch.cat([torch.tensor(found[f"part.{n}.{x}"]) for n in mine], 1).transpose(0, 1)[None]
            for x in ("key", "value")
        )
        if policy.positions == "cache":  # given as they are without rotation
            rotary, index = layer.held.rotary, torch.arange(q.shape[2])
            q, k = rotary.turn(q, index), rotary.turn(k, index)
        start, out = 0, []
        while start < q.shape[2]:
            stop = start + (manifest["prompt"] if start == 0 else 1)
            now = (x[:, :, start:stop] for x in (q, k, v))
            out.append(advance(layer.held, *now, scale=q.shape[-1] ** -0.5))
            start = stop
        there = torch.tensor(found[f"layer.{i}.output"]).transpose(0, 1)
        assert torch.allclose(torch.cat(out, 2)[0], there, atol=2e-3)


def _model(folder: Path) -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(folder / "model").eval()


def test_every_kind_of_policy_has_a_kit() -> None:
    for policy in policies(6, ModelShape(layers=2, kv_heads=2, head_dim=32, heads=4), seed=3):
        plain = policy.quantizer.model_copy(update={"offset": None})  # which is of one model
        policy = policy.model_copy(update={"quantizer": plain})
        manifest = json.loads(kit(policy)["vectors.json"])
        assert all(p["compactions"] for p in manifest["parts"]) == policy.compacts
        assert len(manifest["parts"]) >= 2


@pytest.mark.parametrize(
    ("field", "heads"), [("budgets", 1), ("budgets", 3), ("head_tiers", 2), ("head_tiers", 5)]
)
def test_a_kit_has_as_many_heads_as_the_lists(field: str, heads: int, tmp_path: Path) -> None:
    """transformers takes its model, and the plain reader finds the same bytes for every head."""
    rows = [[1 + (i + j) % 3 for j in range(heads)] for i in range(3)]
    tiers = dict(others=[[dict(key_bits=8, value_bits=4)]], of=[[x % 2 for x in r] for r in rows])
    lists = dict(budgets=dict(kind="sensitivity", weights=rows), head_tiers=tiers)
    policy = Policy.build({**SCORED, **FOUR, "quantizer": dict(group=8), field: lists[field]})
    for name, content in kit(policy).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    config = _model(tmp_path).config
    assert (config.num_hidden_layers, config.num_key_value_heads) == (3, heads)
    assert config.num_attention_heads == 2 * heads and config.hidden_size % (2 * heads) == 0
    assert {h for p in Kit(tmp_path).manifest["parts"] for h in p["heads"]} == {*range(heads)}
    for name, off in Kit(tmp_path).replay_caches():
        assert off < (1e-5 if name.startswith("output") else 0.5), (name, off)


def test_a_policy_for_a_whole_model_is_refused_at_once(tmp_path: Path, capsys: Any) -> None:
    """The policy of the first command: in every stream some eviction hangs on rounding."""
    zoo = Path(__file__).resolve().parents[2] / "docs" / "zoo" / "smollm2-135m-b256"
    argv = ["export", str(zoo / "policy.json"), "--to", "vectors", "-o", str(tmp_path / "kit")]
    code, out, err = call(argv, capsys)
    assert (code, out) == (2, "") and "the first two rows of budgets.weights" in err
    assert len(err.splitlines()) == 1 and not (tmp_path / "kit").exists()
    data = json.loads((zoo / "policy.json").read_text(encoding="utf-8"))
    weights = data["budgets"]["weights"][:2]
    data |= dict(
        slots=64, recent_window=16, sinks=2, budgets={**data["budgets"], "weights": weights}
    )
    parts = json.loads(kit(Policy.build(data))["vectors.json"])["parts"]
    heads = [(p["layer"], h) for p in parts for h in p["heads"]]
    assert sorted(heads) == [(i, h) for i in (0, 1) for h in range(3)]


def test_a_kit_is_the_same_every_time() -> None:
    policy = Policy.build(POLICIES["window"])
    assert kit(policy) == kit(policy)


def test_a_kit_is_written_once_and_needs_no_text(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "mine.json"
    file.write_text(Policy.build(POLICIES["window"]).to_json())
    code, out, _ = call(["export", str(file), "--to", "vectors"], capsys)
    assert code == 0 and str(tmp_path / "mine-vectors" / "arrays.safetensors") in out
    (tmp_path / "mine-vectors" / "vectors.json").write_text("edited")
    for argv, part in (
        ([], "--force"), (["-o", str(tmp_path / "b"), "--verify"], "--verify is for runtimes"),
        (["-o", str(tmp_path / "b"), "--context", "9"], "--context is for runtimes"),
    ):  # fmt: skip
        code, _, err = call(["export", str(file), "--to", "vectors", *argv], capsys)
        assert code == 2 and part in err
    assert not (tmp_path / "b").exists()
    with pytest.raises(PolicyError, match="anchors belong to a certain text"):
        kit(Policy.build(dict(anchors={})))


def test_the_reader_packs_as_the_page_says() -> None:
    """A byte of two codes holds channels i and i + D/2; the file's arrays are little-endian."""
    assert pack([1, 2, 3, 4], 4) == [1 | 3 << 4, 2 | 4 << 4]
    three = [1 | 3 << 2 | 1 << 4 | 3 << 6, 2 | 2 << 6, 0b11001001]
    assert pack([5, 2, 3, 4, 1, 0, 7, 6], 3) == three
    assert encode([0.0, 1.5, 3.0, 0.4], 2, 4) == ([0, 2, 3, 0], [1.0, 0.0])
    assert half(0.1) == struct.unpack("<e", struct.pack("<e", 0.1))[0] != 0.1
    assert arrays.__module__ == "tests.vectors_reader"
