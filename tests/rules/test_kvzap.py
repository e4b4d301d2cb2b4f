"""KVzip's score, predicted: who stays, by the formula, and weights that travel with a policy."""

import hashlib
import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
from safetensors import safe_open

from kvsearch.cache import PolicyCache
from kvsearch.commands.learn import learn
from kvsearch.commands.push import push
from kvsearch.errors import KvsearchError, PolicyError
from kvsearch.evaluation.evaluator import Evaluator, stepwise
from kvsearch.models import learned
from kvsearch.models.learned import Learned, sample_of
from kvsearch.models.load import LoadedModel, load_model
from kvsearch.policy import Budgets, Policy, layout
from kvsearch.policy_space.methods import at
from kvsearch.report.write import write_tables
from kvsearch.results.folder import RunFolder
from kvsearch.rules import KVzap
from kvsearch.run.summarise import read as read_summary
from kvsearch.session.learned import with_learned
from kvsearch.train.kvzap import fit
from tests.cache_cases import HEADS, IDS, PROMPT, SETTING, T, of_rule, tiny
from tests.command import exit_code

L, H, C = 4, 2, 48
DRAW = np.random.default_rng(5)
WEIGHT, BIAS = DRAW.normal(size=(L, H, C)).astype("f") / 7, DRAW.normal(size=(L, H)).astype("f")
LOADED = tiny()


def drawn(model: Any = LOADED.model) -> Learned:
    """Weights that rank tokens at random, of a model."""
    made = (torch.from_numpy(x) for x in (WEIGHT, BIAS))
    return Learned(*made, sample_of(model), "tiny")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A disk cache of its own, and nothing known of earlier files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(KVzap, "folders", {})
    return tmp_path


SHA = hashlib.sha256(drawn().encoded()).hexdigest()
RULE = partial(KVzap, weights=SHA)
CASES = of_rule("kvzap", RULE) | {
    "kvzap after a prompt": Policy(**{**HEADS, "slots": 90}, trigger="prompt+stream", rule=RULE()),
    "kvzap, the prompt stays": Policy(
        slots=24, interval=4, sinks=2, recent_window=6, trigger="generation", rule=RULE()
    ),
    "kvzap with heads that share": Policy(
        **{**HEADS, "budgets": Budgets(kind="adakv")}, rule=RULE()
    ),
    "kvzap with one threshold": Policy(  # which heads keep more: test_rereading.py
        slots=90,
        sinks=3,
        trigger="prompt",
        rule=RULE(),
        budgets=Budgets(kind="adakv", across="model"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_one_pass_equals_token_by_token_and_any_cut(name: str) -> None:
    learned.keep(drawn().encoded(), LOADED.model)
    policy = CASES[name]
    prompt = PROMPT if policy.trigger != "stream" else 1
    ids = IDS[:1] if policy.budgets.kind == "adakv" else IDS
    slow, cache = stepwise(LOADED, policy, ids, prompt=prompt)
    quality = Evaluator(LOADED, batch=2).quality(policy, ids, prompt=prompt)
    assert np.abs(slow - quality.nll).max() < 1e-5
    sizes = layout(policy, LOADED.shape)
    assert cache.bytes_resident == sizes.bytes_at(T, prompt) == quality.bytes_resident
    seen, parts, chunked = 0, [], PolicyCache(policy, LOADED.model)
    with torch.inference_mode():
        for m in (PROMPT, 1, 1, 37, 1, T - PROMPT - 40):
            x = torch.from_numpy(ids[:, seen : seen + m])
            parts.append(LOADED.model(x, past_key_values=chunked).logits)
            seen += m
            assert chunked.bytes_resident == sizes.bytes_at(seen, PROMPT)
    if policy.trigger == "stream" or prompt == PROMPT:
        nll = torch.nn.functional.cross_entropy(
            torch.cat(parts, 1)[:, :-1].mT, torch.from_numpy(ids[:, 1:]), reduction="none"
        )
        assert np.abs(nll.numpy() - slow).max() < 1e-5


def test_the_tokens_with_the_largest_predictions_stay() -> None:
    """In every head of every layer, by the formula; hidden states are those of the same policy."""
    learned.keep(drawn().encoded(), LOADED.model)
    sinks, recent, interval, slots = 3, 8, 16, 64
    policy = Policy(slots=slots, sinks=sinks, recent_window=recent, interval=interval, rule=RULE())
    cache = PolicyCache(policy, LOADED.model, native=torch.float64)
    layers = LOADED.model.model.layers
    held = [[list[int]() for _ in range(H)] for _ in range(L)]
    scores = np.zeros((L, H, T))
    inputs: dict[int, torch.Tensor] = {}
    hooks = [
        layer.input_layernorm.register_forward_hook(
            lambda m, a, out, i=i: inputs.__setitem__(i, out[0, 0])
        )
        for i, layer in enumerate(layers)
    ]
    every = np.zeros((L, H, T, 16))
    with torch.inference_mode():
        for t in range(T):
            LOADED.model(torch.from_numpy(IDS[:1, t : t + 1]), past_key_values=cache)
            for i in range(L):
                x = inputs[i].numpy()
                scores[i, :, t] = WEIGHT[i] @ x + BIAS[i]
                v = layers[i].self_attn.v_proj(inputs[i]).view(H, -1).numpy()
                every[i, :, t] = v
            for i, h in np.ndindex(L, H):
                mine = held[i][h]
                mine.append(t)
                excess = len(mine) - (slots - interval)
                if (t + 1) % interval == 0 and excess > 0:
                    free = mine[sinks : len(mine) - recent]
                    gone = sorted(free, key=lambda j: scores[i, h, j])[:excess]
                    held[i][h] = [j for j in mine if j not in gone]
    for hook in hooks:
        hook.remove()
    for i, group in enumerate(cache.groups):
        stored = group.store.read()[1][0].numpy()
        for h in range(H):
            want = every[i, h, held[i][h]]
            np.testing.assert_allclose(stored[h], want, atol=1e-9)
    assert len({tuple(x) for rows in held for x in rows}) == L * H, "heads choose for themselves"


def test_every_row_of_a_padded_batch_is_as_alone() -> None:
    learned.keep(drawn().encoded(), LOADED.model)
    policy, pad = CASES["kvzap every token"], 9
    ids = torch.from_numpy(IDS[:, :80])
    mask = torch.ones_like(ids)
    mask[1, :pad] = 0
    at = (mask.cumsum(-1) - 1).clamp_min(0)
    cache = PolicyCache(policy, LOADED.model)
    with torch.inference_mode():
        got = [
            LOADED.model(
                ids[:, a:b], attention_mask=mask[:, :b], position_ids=at[:, a:b],
                past_key_values=cache,
            )
            for a, b in ((0, 60), *((t, t + 1) for t in range(60, 80)))
        ]  # fmt: skip
        for row, first in ((0, 0), (1, pad)):
            alone = PolicyCache(policy, LOADED.model)
            want = LOADED.model(ids[row : row + 1, first:], past_key_values=alone).logits[0]
            mine = torch.cat([x.logits for x in got], 1)[row, first:]
            assert (mine - want).abs().max() < 1e-5


def test_weights_are_the_ridge_regression_of_kvzips_scores() -> None:
    """Against a solution over all tokens at once, from attention that the model itself gives."""
    loaded = replace(tiny(layers=2), tokenizer=Words())
    rows, rest = np.vstack([IDS[:, :70], IDS[:, 70:140]]), IDS[:1, 80:150]
    found = fit(loaded, rows, rest)
    xs, ys = (
        np.concatenate(part, 1) for part in zip(*(read(loaded, r) for r in rows), strict=True)
    )
    tx, ty = read(loaded, rest[0])
    for i in range(2):
        mean, std = xs[i].mean(0), xs[i].std(0)
        x, y = (xs[i] - mean) / std, ys[i] - ys[i].mean(0)
        w = np.linalg.solve(x.T @ x + 0.03 * len(x) * np.eye(C), x.T @ y)
        said = (tx[i] - mean) / std @ w + ys[i].mean(0)
        mine = tx[i] @ found.learned.weight[i].numpy().T + found.learned.bias[i].numpy()
        np.testing.assert_allclose(mine, said, atol=1e-3)
        share = 1 - np.square(said - ty[i]).sum(0) / np.square(ty[i] - ty[i].mean(0)).sum(0)
        np.testing.assert_allclose(found.explained[i], share, atol=1e-3)


class Words:
    """A tokenizer: a token for every word."""

    def __call__(self, text: str, **_: bool) -> dict[str, list[int]]:
        return {"input_ids": [len(word) for word in text.split(" ")]}

    def get_vocab(self) -> dict[str, int]:
        return {}


def read(loaded: LoadedModel, row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Inputs `[L, M, hidden]` and log scores `[L, M, H]` of a context but for 4 sinks."""
    told = Words()("\n\nRepeat the previous context exactly.\n")["input_ids"]
    both = torch.tensor([[*row, *told, *row]])
    model, inputs = loaded.model, list[torch.Tensor]()
    hooks = [
        layer.input_layernorm.register_forward_hook(lambda m, a, out: inputs.append(out[0]))
        for layer in model.model.layers
    ]
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        maps = model(both, output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    for hook in hooks:
        hook.remove()
    n = len(row)
    most = [a[0, :, n:, :n].view(2, 3, -1, n).amax((1, 2)).log().mT.numpy() for a in maps]
    return np.stack([x[4:n].numpy() for x in inputs]), np.stack([y[4:] for y in most])


FILE = f"kvzap-{SHA[:16]}.safetensors"


@pytest.fixture
def shared(place: Path) -> Path:
    """A policy with its weights beside it, in no disk cache."""
    folder = place / "shared"
    folder.mkdir()
    (folder / FILE).write_bytes(drawn().encoded())
    (folder / "policy.json").write_text(CASES["kvzap every token"].to_json())
    return folder


def test_weights_go_along_to_where_the_policy_goes(
    shared: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An export, a folder that is shared and one that is fetched from the hub have them."""
    out, hub = place / "out", place / "hub"
    assert json.loads((shared / "policy.json").read_text())["rule"]["weights"] == SHA
    assert PolicyCache.from_json(shared / "policy.json", LOADED.model).policy.rule == RULE()
    shared = Path(shutil.move(shared, place / "moved"))
    assert exit_code("export", shared / "policy.json", "--to", "transformers", "-o", out) == 0
    push(out, out=hub)
    data = (shared / FILE).read_bytes()
    shutil.rmtree(shared)
    for folder in (out, hub):
        assert (folder / FILE).read_bytes() == data
        monkeypatch.setattr(KVzap, "folders", {})
        PolicyCache.from_pretrained(folder, LOADED.model)
        assert exit_code("validate", folder / "policy.json") == 0

    def download(repo_id: str, filename: str, *, revision: str | None) -> str:
        (place / "fetched").mkdir(exist_ok=True)
        return str(shutil.copy(hub / filename, place / "fetched"))

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(KVzap, "folders", {})
    cache = PolicyCache.from_pretrained("ann/zap", LOADED.model)
    assert cache.policy.rule == RULE() and (place / "fetched" / FILE).read_bytes() == data


def test_a_run_folder_keeps_its_weights_when_it_moves(shared: Path) -> None:
    """A report is written again where no policy file was read, and with an empty disk cache."""
    run_folder = Path(__file__).parents[2] / "studies" / "2026-11-outcome" / "b256"
    found = read_summary(RunFolder(run_folder, write=False))
    best = found.row(found.recommended or "")
    best = replace(best, policy=CASES["kvzap every token"])
    write_tables(replace(found, recommended=best.name, rows=[best]), shared)
    assert Policy.from_json(shared / "best.json").rule == RULE()


@pytest.mark.parametrize(
    ("command", "change"),
    [
        *((c, x) for c in ("validate", "export", "push") for x in ("missing", "changed")),
        *((c, "none") for c in ("export", "push")),
    ],
)
def test_no_command_takes_a_policy_without_its_weights(
    command: str, change: str, shared: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if change == "missing":
        (shared / FILE).unlink()
    elif change == "changed":
        (shared / FILE).write_bytes(b"x" + (shared / FILE).read_bytes()[1:])
    else:
        policy = CASES["kvzap every token"].model_copy(update={"rule": KVzap()})
        (shared / "policy.json").write_text(policy.to_json())
    out = [] if command == "validate" else ["-o", place / "out"]
    assert exit_code(command, shared / "policy.json", *out) == 2
    said = capsys.readouterr().err
    assert "kvsearch adapt --rule kvzap" in said and len(said.splitlines()) == 1
    assert not (place / "out").exists()


def test_a_kit_for_any_model_has_no_weights(
    shared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("export", shared / "policy.json", "--to", "vectors", "-o", shared / "kit") == 2
    assert "weights of the rule belong to a certain text or model" in capsys.readouterr().err


def test_the_method_by_name_is_exported_with_the_weights_of_the_model(
    tiny_folder: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ask = ("export", "kvzap", "--budget", 90, "--model", tiny_folder, "-o", place / "out")
    assert exit_code(*ask) == 2
    model, said = capsys.readouterr().err.splitlines()
    assert model.startswith("model ") and "kvsearch adapt --rule kvzap" in said
    assert not (place / "out").exists()
    loaded = load_model(str(tiny_folder))
    made = Learned(torch.ones(2, 2, 32), torch.zeros(2, 2), sample_of(loaded.model), "tiny")
    sha256 = learned.keep(made.encoded(), loaded.model)
    assert exit_code(*ask) == 0
    shutil.rmtree(place / "cache")
    cache = PolicyCache.from_json(place / "out" / "policy.json", loaded.model)
    assert cache.policy.rule == KVzap(weights=sha256)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("missing", "the weights of rule 'kvzap' are missing: kvzap-"),
        ("changed", "is not the file that the policy was made with"),
        ("another", "was trained for tiny, with 4 layers of 2 KV heads and other weights than"),
        ("smaller", "was trained for tiny, with 4 layers of 2 KV heads and other weights than"),
        ("none", "rule 'kvzap' has no weights for this model; train them with kvsearch adapt"),
        ("channels", "field channels: the weights of rule 'kvzap' were trained for a model with"),
    ],
)
def test_wrong_weights_are_one_sentence(change: str, said: str, place: Path) -> None:
    policy, model, data = CASES["kvzap every token"], LOADED.model, drawn().encoded()
    if change == "changed":
        data = data[:-1] + bytes([data[-1] ^ 1])
    if change == "none":
        policy = policy.model_copy(update={"rule": KVzap()})
    elif change != "missing":
        (place / f"kvzap-{SHA[:16]}.safetensors").write_bytes(data)
    if change == "another":
        model = tiny(seed=1).model
    if change == "smaller":
        model = tiny(layers=2).model
    (place / "policy.json").write_text(policy.to_json())
    if change == "channels":
        plain = json.loads(policy.to_json())
        plain["channels"] = {x: ["none", "all", "all", "all"] for x in ("qk", "vo")}
        (place / "policy.json").write_text(json.dumps(plain))
    with pytest.raises(PolicyError, match=said) as error:
        PolicyCache.from_json(place / "policy.json", model)
    assert "\n" not in str(error.value)


def test_adapt_fits_the_rule_and_eval_runs_it(
    tiny_folder: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = place / "text.txt", place / "zap"
    text.write_text("".join(f"Line {i} says {i * i % 97}.\n" for i in range(400)))
    more = ["--model", tiny_folder, "--text", text, "--quiet"]
    fit_it = ["--out", out, "--context", 128, "--steps", 6, "--budget", 70]
    assert exit_code("adapt", "--rule", "kvzap", *more, *fit_it) == 0
    policy = Policy.from_json(out / "policy.json")
    assert isinstance(policy.rule, KVzap) and policy.rule.weights is not None
    file = out / f"kvzap-{policy.rule.weights[:16]}.safetensors"
    with safe_open(file, "pt") as held:
        assert held.get_tensor("weight").shape == (2, 2, 32)
    assert json.loads((out / "learned.json").read_text())["explained"] > 0.1
    capsys.readouterr()
    for asked, size in ((out / "policy.json", ()), ("kvzap", ("--budget", 90))):
        assert exit_code("eval", asked, *more, *size, "--context", 256, "--json") == 0
        assert '"dnll_full"' in capsys.readouterr().out
    file.unlink()
    shutil.rmtree(place / "cache")
    assert exit_code("eval", out / "policy.json", *more, "--context", 256) == 2
    assert "are missing" in capsys.readouterr().err


def test_a_search_proposes_the_rule_where_it_has_weights() -> None:
    setting = replace(SETTING, learned="")
    with pytest.raises(PolicyError, match="rule 'kvzap' has no weights for this model; train them"):
        at("kvzap", setting)
    assert with_learned(setting, LOADED).learned == ""
    learned.keep(drawn().encoded(), LOADED.model)
    policy = at("kvzap", with_learned(setting, LOADED))
    assert policy.rule == RULE() != at("kvzap", SETTING).rule
    assert policy.fingerprint() != at("kvzap", SETTING).fingerprint()


def test_what_does_not_go_with_a_rule_is_one_sentence(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for options, said in (
        (["--rule", "kvzap", "--lr", "0.1"], "--lr does not go with --rule kvzap"),
        (["--rule", "kvzip"], "rule 'kvzip' has no weights"),
        (["window", "--rule", "kvzap"], "or a rule with --rule"),
        ([], "or a rule with --rule"),
    ):
        assert exit_code("adapt", *options, "--out", place / "x") == 2
        assert said in capsys.readouterr().err
    with pytest.raises(KvsearchError, match="has no weights"):
        learn("h2o", out=place / "x")
    with pytest.raises(PolicyError, match="weights"):
        Policy.build({"slots": 9, "rule": {"name": "kvzap", "weights": "no hash"}})
