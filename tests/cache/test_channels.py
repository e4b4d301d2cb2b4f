"""Channels: which are removed, what is stored without them, and that the logits say the same."""

import copy
import json
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsearch import Text, search
from kvsearch.cache import PolicyCache
from kvsearch.cache.model.projections import outputs
from kvsearch.errors import ModelError, PolicyError
from kvsearch.evaluation.evaluator import Evaluator, stepwise
from kvsearch.model_analysis import channel_importance, layer_ppl_rise
from kvsearch.models import disk_cache
from kvsearch.models.projections import projections
from kvsearch.policy import Channels, ModelShape, Policy, Quantizer, Tier, check, layout
from kvsearch.policy.pruning import Importance, Orders, channels
from kvsearch.policy.ratios import by_rise, evenly_spaced, smallest_rise
from kvsearch.report.describe import describe
from kvsearch.rules import Critical
from tests.cache_cases import EXTRA, IDS, PROMPT, T, long_enough, tiny

SHAPE = ModelShape(layers=4, kv_heads=2, head_dim=16, heads=6)

rises = st.lists(st.floats(-1, 2000), min_size=1, max_size=40)
ratios = st.floats(0, 1)


@settings(max_examples=200, deadline=None)
@given(rises, ratios, st.floats(0.01, 100), st.floats(0, 1))
def test_equation_1_has_the_mean_asked_for_and_takes_least_where_ppl_rises_most(
    ppl_rise: list[float], ratio: float, temperature: float, room: float
) -> None:
    cap = ratio + room * (1 - ratio)
    shares = by_rise(ppl_rise, ratio, temperature=temperature, cap=cap)
    assert sum(shares) == pytest.approx(ratio * len(ppl_rise), abs=1e-9)
    assert all(-1e-12 <= s <= cap for s in shares)
    ranked = [s for _, s in sorted(zip(ppl_rise, shares, strict=True), key=lambda x: x[0])]
    assert all(a >= b - 1e-9 for a, b in pairwise(ranked))


def test_equation_1_below_the_cap_is_the_softmax_times_n() -> None:
    shares = by_rise([0.0, 1.0, 2.0], 0.2)
    assert shares == pytest.approx([0.6 * w / 1.5032147 for w in (1, 0.3678794, 0.1353353)])
    # the excess of the first goes to the others in proportion to their own weights
    assert by_rise([0.0, 1000.0, 1001.0], 0.5) == pytest.approx([1, 0.3655293, 0.1344707])


@settings(max_examples=100, deadline=None)
@given(rises, ratios)
def test_equation_2_removes_whole_layers_smallest_rise_first(
    ppl_rise: list[float], ratio: float
) -> None:
    shares = smallest_rise(ppl_rise, ratio)
    chosen = [h for h, s in zip(ppl_rise, shares, strict=True) if s == 1]
    assert sum(shares) == sum(evenly_spaced(len(ppl_rise), ratio)) == len(chosen)
    assert len(chosen) - 1 < ratio * len(ppl_rise) <= len(chosen) + 1e-6
    assert not chosen or max(chosen) <= min(
        (h for h, s in zip(ppl_rise, shares, strict=True) if s == 0), default=max(ppl_rise)
    )
    assert sum(smallest_rise(range(30), 0.2)) == 6  # 0.2 * 30 is above 6 in binary


def orders(shape: ModelShape) -> Orders:
    """Even channels first, from the last; the second head from the first."""
    L, D = shape.layers, shape.head_dim
    up = (*range(0, D, 2), *range(1, D, 2))
    down = (*range(D - 2, -1, -2), *range(D - 1, 0, -2))
    half = tuple(tuple(c for c in best if c < D // 2) for best in (down, up))
    return Orders(coupled=(half,) * L, qk=(half,) * L, vo=((down, up),) * L)


RISES = (5.0, 0.1, 900.0, 0.0)
IMPORTANCE = Importance(RISES, {"l2": orders(SHAPE)})


def test_a_coupled_set_is_the_same_in_all_four_matrices_and_keeps_pairs_together() -> None:
    found = channels("uniform", 0.5, IMPORTANCE, SHAPE)
    assert found.pairs(0) == ((0, 2, 4, 6), (0, 2, 4, 6))
    assert found.values(0) == ((0, 2, 4, 6, 8, 10, 12, 14),) * 2
    assert found.on(SHAPE).per_layer == ((8, 8),) * 4
    apart = channels("uniform", 0.75, IMPORTANCE, SHAPE, qk=0.0)
    assert apart.pairs(0) is None
    assert apart.values(0) == ((8, 10, 12, 14), (0, 2, 4, 6))


def test_laws_that_look_at_perplexity_spare_the_layers_that_matter() -> None:
    assert channels("01", 0.5, IMPORTANCE, SHAPE).qk == ("all", "none", "all", "none")
    assert channels("01-even", 0.5, IMPORTANCE, SHAPE).vo == ("all", "none", "all", "none")
    widths = channels("eq1", 0.4, IMPORTANCE, SHAPE).on(SHAPE).per_layer
    assert widths == ((16, 16), (4, 4), (16, 16), (2, 2))
    assert channels("eq1", 0.5, IMPORTANCE, SHAPE).removed(3)
    with pytest.raises(PolicyError, match="perplexity without each layer"):
        channels("01", 0.5, Importance(), SHAPE)


@pytest.mark.parametrize(("law", "ratio"), [("uniform", 0.97), ("eq1", 1.0), ("01", 1.2)])
def test_a_head_keeps_something(law, ratio) -> None:
    with pytest.raises(PolicyError, match=r"channels\.ratio: .* every channel of a head"):
        channels(law, ratio, IMPORTANCE, SHAPE)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"qk": ["all"] * 3 + ["f f"] * 2}, r"channels\.qk: 5 words for a model with 4 layers"),
        ({"vo": ["f", "all", "all", "all"]}, r"channels\.vo: layer 0 has masks of 1 heads"),
        ({"vo": ["all", "10000 1", "all", "all"]}, r"layer 1 keeps a channel beyond the 16"),
        ({"qk": ["all", "3 1", "all", "all"]}, r"layer 1 keeps between 1 and 2 channels"),
        ({"qk": ["all", "0 0", "all", "all"]}, r"layer 1 keeps no channel of a head"),
        ({"qk": ["none", "all", "all", "all"]}, r"layer 0 is removed from one of qk and vo"),
        ({"qk": ["none"] * 4, "vo": ["none"] * 4}, r"no layer is left"),
    ],
)
def test_channels_that_no_model_of_the_shape_can_run_are_refused(fields, message) -> None:
    with pytest.raises(PolicyError, match=message):
        check(Policy.build({"channels": fields}), SHAPE)


def test_a_format_must_fit_the_channels_that_are_left() -> None:
    four = (Tier(key_bits=4, value_bits=4),)
    few = Channels(vo=("fff fff", "all", "all", "all"))
    for group, message in ((8, r"quantizer\.group: 8 does not divide the 12 value"), (4, "tiers")):
        with pytest.raises(PolicyError, match=message):
            check(Policy(tiers=four, quantizer=Quantizer(group=group), channels=few), SHAPE)
    keys = (Tier(key_bits=4),)
    check(Policy(tiers=keys, quantizer=Quantizer(group=8), channels=few), SHAPE)


def test_bytes_follow_the_channels_and_a_removed_layer_costs_none() -> None:
    kept = Channels(qk=("f f", "none", "all", "all"), vo=("3 3", "none", "all", "all"))
    sizes = layout(Policy(channels=kept), SHAPE)
    assert sizes.bytes_at(10) == 10 * 2 * 2 * (8 + 2 + 4 * 16) == sizes.bytes_peak(10)
    assert sizes.shape.budget_bytes(10) == sizes.bytes_at(10)
    again = Policy.parse(Policy(channels=kept).to_json())
    assert again.fingerprint(4) == Policy(channels=kept).fingerprint(4) != Policy().fingerprint(4)
    assert Policy(channels=Channels(qk=("all",) * 4)).fingerprint(4) == Policy().fingerprint(4)


# -- the view ----------------------------------------------------------------------------------

KEPT = Channels(  # heads of 16 channels: 8 pairs
    qk=("1e d2", "none", "all", "3c f"), vo=("ff00 5555", "none", "f0f 3333", "all")
)


def fitting() -> dict[str, Policy]:
    """Policies of every kind that can store 8 channels of a head, with channels removed."""
    found = {}
    for name, policy in EXTRA.items():
        pruned = policy.model_copy(update={"channels": KEPT})
        try:
            check(pruned, SHAPE)
        except PolicyError:
            continue
        found[name] = pruned
    whole = [p for p in EXTRA.values() if p.rule and {"queries", "outputs"} & p.rule.needs]
    assert len(found) > 0.9 * (len(EXTRA) - len(whole))  # those rules read whole heads
    return found


FITTING = fitting()


@pytest.mark.parametrize(
    "name",
    ["attention in three tiers", "prompt, then stream", "heads in ladders", "grouped along tokens",
     "heads that share their layer's slots", "key-norm every token"],
)  # fmt: skip
def test_one_pass_equals_token_by_token_and_bytes_are_exact(name: str, loaded) -> None:
    policy = FITTING[name]
    sizes = layout(policy, loaded.shape)
    tokens, prompt = long_enough(sizes), PROMPT if policy.trigger != "stream" else 1
    rows = 1 if policy.budgets.kind == "adakv" else 2  # which serves no batches
    ids = IDS[:rows, :tokens]
    slow, cache = stepwise(loaded, policy, ids, prompt=prompt)
    quality = Evaluator(loaded, batch=2).quality(policy, ids, prompt=prompt)
    assert np.abs(slow - quality.nll).max() < 1e-5
    assert cache.bytes_resident == sizes.bytes_at(tokens, prompt) == quality.bytes_resident
    assert cache.bytes_peak_resident >= sizes.bytes_peak(tokens, prompt)
    removed = cache.held[1]
    assert removed.nbytes == 0 and removed.seen == tokens


def without(model, channels: Channels):
    """A whole model whose removed channels are zero in the weights."""
    model = copy.deepcopy(model)
    H, D = SHAPE.kv_heads, SHAPE.head_dim
    for i, block in enumerate(model.model.layers):
        a = block.self_attn
        if channels.removed(i):
            a.o_proj.weight.zero_()
            continue
        for h in range(H):
            pairs, values = channels.pairs(i), channels.values(i)
            keys = range(D) if pairs is None else [p + x for p in pairs[h] for x in (0, D // 2)]
            gone = [c for c in range(D) if c not in keys]
            lost = [c for c in range(D) if values is not None and c not in values[h]]
            a.k_proj.weight[[h * D + c for c in gone]] = 0
            a.v_proj.weight[[h * D + c for c in lost]] = 0
    return model


def test_the_view_is_the_model_with_zeros_at_the_old_softmax_scale(loaded) -> None:
    ids = torch.from_numpy(IDS)
    with torch.inference_mode():
        theirs = without(loaded.model, KEPT)(ids).logits
        for positions in ("original", "cache"):
            policy = Policy(channels=KEPT, slots=T + 1, positions=positions)
            cache = PolicyCache(policy, loaded.model, native=torch.float64)
            mine = [
                loaded.model(x, past_key_values=cache).logits for x in ids.split([60, 1, T - 61], 1)
            ]
            assert (torch.cat(mine, 1) - theirs).abs().max() < 1e-5
        assert (theirs - loaded.model(ids).logits).abs().max() > 0.1


def test_keys_that_do_not_turn_as_pairs_keep_all_channels() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=2, n_positions=64)
    model = GPT2LMHeadModel(config).double().eval()
    values = Channels(vo=("ff ff", "all"))
    PolicyCache(Policy(channels=values), model)
    with pytest.raises(ModelError, match=r"channels\.qk needs rotary embeddings"):
        PolicyCache(Policy(channels=Channels(qk=("f f", "all"))), model)
    with pytest.raises(ModelError, match="apart from each other, and layer 0 of this 'gpt2' model"):
        projections(model)


def test_who_has_no_whole_projection_says_so(loaded) -> None:
    channels = Channels(vo=("00ff 00ff",) * 4)
    with pytest.raises(PolicyError, match=r"field channels\.vo: rule 'critical' multiplies whole"):
        check(Policy(slots=44, rule=Critical(), channels=channels), loaded.shape)
    fused = tiny()
    del fused.model.model.layers[1].self_attn.o_proj
    with pytest.raises(ModelError, match=r"rule 'critical' needs whole .* and layer 1 of this"):
        outputs(Policy(slots=44, rule=Critical()), fused.model)


# -- what is measured ---------------------------------------------------------------------------


def test_the_rise_in_perplexity_is_exact_and_a_pass_starts_at_its_layer(loaded) -> None:
    passed, steps = [], []
    first = loaded.model.model.layers[0].self_attn.q_proj
    hook = first.register_forward_hook(lambda _, given, __: passed.append(given[0].shape[1]))
    found = layer_ppl_rise.measure(Evaluator(loaded), IDS, lambda: steps.append(1))
    hook.remove()
    assert passed.count(T) == 4 and len(steps) == 8  # two windows: the full pass, and layer 0's
    for layer in (0, 3):
        words = tuple("none" if i == layer else "all" for i in range(4))
        model = without(loaded.model, Channels(qk=words, vo=words))
        ids, ppl = torch.from_numpy(IDS), []
        for x in (model, loaded.model):
            with torch.inference_mode():
                logits = x(ids).logits[:, :-1].flatten(0, 1)
            lost = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten())
            ppl.append(float(lost.exp()))
        assert found[layer] == pytest.approx(ppl[0] - ppl[1], rel=1e-2)  # 16-bit storage


@contextmanager
def step(title: str, total: float):
    yield SimpleNamespace(advance=lambda *_: None)


@pytest.mark.parametrize("score", ["l1", "l2", "taylor"])
def test_scores_are_sums_over_a_slice_of_four_matrices(score, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(disk_cache, "cache_folder", lambda: tmp_path)
    loaded, H, G, D = tiny(3), 2, 3, 16
    found = channel_importance.orders(loaded, score, IDS, step)
    layer = 2
    p = projections(loaded.model)[layer]
    weights = [x.weight for x in (p.q, p.k, p.v, p.o)]
    assert not any(w.requires_grad or w.grad is not None for w in weights)
    if score == "taylor":
        rows = torch.from_numpy(IDS[:, :128])
        for w in weights:
            w.requires_grad_(True)
        logits = loaded.model(rows).logits[:, :-1].flatten(0, 1)
        lost = torch.nn.functional.cross_entropy(logits, rows[:, 1:].flatten(), reduction="sum")
        slices = [w * g for w, g in zip(weights, torch.autograd.grad(lost, weights), strict=True)]
    else:
        slices = weights
    power = 2 if score == "l2" else 1
    q, k, v, o = (x.detach().abs() ** power for x in slices)
    for h in range(H):
        parts = torch.stack(
            [
                q.sum(1).view(H, G, D)[h].mean(0),
                k.sum(1).view(H, D)[h],
                v.sum(1).view(H, D)[h],
                o.sum(0).view(H, G, D)[h].mean(0),
            ]
        )
        pairs = parts[:, :8] + parts[:, 8:]
        assert list(found.coupled[layer][h]) == pairs.sum(0).argsort(descending=True).tolist()
        assert list(found.qk[layer][h]) == pairs[:2].sum(0).argsort(descending=True).tolist()
        assert list(found.vo[layer][h]) == parts[2:].sum(0).argsort(descending=True).tolist()
    assert channel_importance.orders(loaded, score, IDS, step) == found


def test_a_policy_with_channels_says_so() -> None:
    said = describe(Policy(channels=KEPT))
    assert said.startswith(
        "Pruned channels: every token kept, 1 of 4 layers without attention and 3"
    )
    assert "2 of 4 layers without attention" in describe(
        Policy(slots=40, channels=Channels(qk=("none", "all") * 2, vo=("none", "all") * 2))
    )


def test_a_search_reaches_channels_and_measures_what_its_space_needs(tiny_folder, tmp_path) -> None:
    space = tmp_path / "space.yaml"
    space.write_text(
        "version: 2\nname: channels\naxes:\n"
        "  channels: {choice: [eq1, '01']}\n"
        "  channels.ratio: {float: [0.1, 0.5]}\n"
        "  channels.score: {choice: [l2, taylor], when: {channels: eq1}}\n"
        "  interval: {choice: [16]}\n"
    )
    text = Text(" ".join(str(i * i) for i in range(900)), "squares")
    options = dict(
        budget_slots=64, context=160, trials=3, space=space, out=tmp_path / "run", bench=False,
        sampler="random",
    )  # fmt: skip
    found = search(str(tiny_folder), text, **options)
    searched = [Policy.build(t.policy) for t in found.summary.trials if t.kind == "searched"]
    assert len(searched) > 2 and all(p.channels.active and p.slots > 64 for p in searched)
    measured = json.loads((tmp_path / "run" / "importance.json").read_text())
    assert len(measured["ppl_rise"]) == 2 and set(measured["orders"]) == {"l2", "taylor"}
