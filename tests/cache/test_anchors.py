"""Anchors: one pass, token by token, and a plain mask over the whole text are the same thing."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvsearch import Text, evaluate, load_model
from kvsearch.cache import PolicyCache
from kvsearch.cache.model.anchors import Stream
from kvsearch.errors import PolicyError
from kvsearch.evaluation.anchored_tokens import feed
from kvsearch.evaluation.evaluator import Evaluator, stepwise
from kvsearch.models.load import LoadedModel
from kvsearch.policy import Anchors, Budgets, Ladder, Policy, Quantizer, Tier, check, layout
from kvsearch.policy.sequences import Flags, course, text_bytes
from kvsearch.policy_space import Setting, build
from kvsearch.report.describe import describe
from kvsearch.rules import Attention
from kvsearch.workloads.text.endings import endings, sentence_ends
from tests.cache.test_device import WAYS, holds
from tests.cache_cases import tiny
from tests.random_policies import covering
from tests.tagged import Device

T = 76
A = (3, 7, 20, 21, 22)  # ids of anchors
IDS = np.random.default_rng(1).integers(0, 97, size=(1, T))
IDS[0, [0, 11, 30, 31, 45, 46, 47, 70]] = 20  # first, after one another, and apart
FLAGS: Flags = np.isin(IDS[0], A)
FEW: dict[str, Any] = dict(sinks=2, recent_window=3)
K4 = (Tier(key_bits=4, value_bits=4),)


def given(**more: Any) -> Anchors:
    return Anchors(at="given", ids=A, **more)


BY_AGE = {  # in 16 bits and with original positions: a mask says it all
    "as published": Policy(anchors=given()),
    "anchors see each other": Policy(anchors=given(isolate=False)),
    "sequences stay open": Policy(anchors=given(close=False)),
    "sinks and a recent window": Policy(**FEW, anchors=given()),
    "every 9 tokens": Policy(sinks=1, anchors=Anchors(at=9)),
    "a range kept in full": Policy(**FEW, anchors=given(protected=(25, 40))),
    "a prompt kept in full": Policy(slots=60, anchors=given(protected="prompt")),
    "slots": Policy(slots=10, **FEW, anchors=given()),
    "slots, interval 4": Policy(slots=14, interval=4, **FEW, anchors=given()),
    "slots, open sequences": Policy(slots=14, interval=4, **FEW, anchors=given(close=False)),
}
OTHERS = {
    "in 4 bits": Policy(
        slots=24, interval=8, **FEW, tiers=K4, anchors=given(),
        quantizer=Quantizer(group=8, fp16_sinks=True, fp16_recent=True),
    ),
    "in 4 bits, no limit": Policy(
        interval=8, **FEW, tiers=K4, quantizer=Quantizer(group=8), anchors=given()
    ),
    "tiers by age": Policy(
        slots=30, interval=6, **FEW, anchors=given(), quantizer=Quantizer(group=8),
        tiers=(Tier(share=0.3), Tier(share=0.7, key_bits=4, value_bits=2)),
    ),
    "re-indexed": Policy(slots=14, interval=3, **FEW, positions="cache", anchors=given()),
    "re-indexed, no limit": Policy(positions="cache", anchors=given()),
    "by rule": Policy(slots=14, interval=3, **FEW, rule=Attention(beta=1), anchors=given()),
    "by rule, a window over intervals": Policy(
        slots=20, interval=6, **FEW, rule=Attention(horizon=12), anchors=given()
    ),
    "ranked tiers": Policy(
        slots=24, interval=6, **FEW, rule=Attention(), anchors=given(),
        quantizer=Quantizer(group=8),
        tiers=(Tier(share=0.3), Tier(share=0.7, key_bits=4, value_bits=2)),
    ),
    "pyramid": Policy(
        slots=24, interval=4, sinks=2, budgets=Budgets(kind="pyramid", beta=4), anchors=given()
    ),
    "prompt, then stream": Policy(
        slots=44, interval=4, **FEW, rule=Attention(horizon=4), trigger="prompt+stream",
        anchors=given(),
    ),
}  # fmt: skip
ALL = BY_AGE | OTHERS
PROMPT = 40  # of the policies that treat the first call in another way


def prompt_of(policy: Policy) -> int:
    return PROMPT if policy.after_prompt else 0


def flags_of(policy: Policy) -> Flags:
    assert policy.anchors is not None
    return (np.arange(T) + 1) % 9 == 0 if policy.anchors.at == 9 else FLAGS


def seen(policy: Policy, flags: Flags) -> tuple[torch.Tensor, list[int]]:
    """Who sees whom `[T, T]`, and what is held at the end, from the definition, step by step."""
    a, protected = policy.anchors, range(0)
    assert a is not None
    if a.protected is not None:
        protected = range(PROMPT) if a.protected == "prompt" else range(*a.protected)
    safe = {*range(policy.sinks), *protected}
    anchors = {i for i, flag in enumerate(flags) if flag and i not in safe}
    visible, held, closed = torch.zeros(len(flags), len(flags), dtype=torch.bool), [], -1
    for i in range(len(flags)):
        held.append(i)
        blind = anchors if a.isolate and i in anchors else set()
        visible[i, [j for j in held if j == i or j not in blind]] = True
        closed = i if i in anchors else closed
        free = [j for j in held if j not in safe and j <= i - policy.recent_window]
        if a.close:
            gone = {j for j in free if j < closed and j not in anchors}
            held, free = ([j for j in x if j not in gone] for x in (held, free))
        if policy.slots is not None and (i + 1) % policy.interval == 0:
            first = sorted(free, key=lambda j: (j in anchors, j))
            over = max(0, len(held) - (policy.slots - policy.interval))
            held = [j for j in held if j not in first[:over]]
    return visible, held


def masked(loaded: LoadedModel, ids: np.ndarray, visible: torch.Tensor) -> np.ndarray:
    """NLL under a mask, by a model without any of our caches."""
    x = torch.from_numpy(ids)
    with torch.inference_mode():
        logits = loaded.model(x, attention_mask=visible[None, None], use_cache=False).logits
        found = logits[:, :-1].log_softmax(-1).gather(2, x[:, 1:, None])
    return -found[..., 0].numpy()


@pytest.mark.parametrize("name", BY_AGE)
def test_one_pass_and_steps_are_the_mask(name: str, loaded: LoadedModel) -> None:
    policy = BY_AGE[name]
    visible, held = seen(policy, flags_of(policy))
    want, exact = masked(loaded, IDS, visible), dict(native=torch.float64)
    prompt = prompt_of(policy)
    once = Evaluator(loaded).quality(policy, IDS, prompt=prompt, **exact).nll
    slow, cache = stepwise(loaded, policy, IDS, prompt=prompt or 1, **exact)
    assert np.abs(once - want).max() < 1e-5 and np.abs(slow - want).max() < 1e-5
    assert cache.groups[2].store.n == len(held)
    part = layout(policy, loaded.shape).layers[0]
    assert course(part, flags_of(policy), prompt).end.tokens.tolist() == held
    full = Evaluator(loaded).quality(Policy(), IDS, resident=False, **exact).nll
    assert np.abs(full - want).max() > 1e-3  # the mask hides something


@pytest.mark.parametrize("name", OTHERS)
def test_one_pass_equals_token_by_token(name: str, loaded: LoadedModel) -> None:
    policy, prompt = OTHERS[name], prompt_of(OTHERS[name])
    slow, cache = stepwise(loaded, policy, IDS, prompt=prompt or 1)
    quality = Evaluator(loaded).quality(policy, IDS, prompt=prompt)
    assert np.abs(slow - quality.nll).max() < 1e-5
    assert cache.bytes_resident == quality.bytes_resident


@pytest.mark.parametrize("name", covering(ALL))
def test_bytes_are_those_of_the_text_at_every_step_and_never_above_the_ceiling(
    name: str, loaded: LoadedModel
) -> None:
    policy = ALL[name]
    first, flags, sizes = prompt_of(policy), flags_of(policy), layout(policy, loaded.shape)
    ids, cache = torch.from_numpy(IDS), PolicyCache(policy, loaded.model)
    cuts = [first or 5, *[1] * 12, 7, 1]  # token by token see below
    cuts.append(T - sum(cuts))
    at, parts = 0, []
    with torch.inference_mode():
        for m in cuts:
            parts.append(loaded.model(ids[:, at : at + m], past_key_values=cache).logits)
            at += m
            asked = text_bytes(sizes, flags[:at], first)
            assert cache.bytes_resident == asked.end <= sizes.bytes_at(at, first)
            assert asked.peak <= sizes.bytes_peak(T, first)
        assert sizes.bytes_at(at, first) <= sizes.bytes_peak(T, first)
        whole, once = PolicyCache(policy, loaded.model, packed=False), []
        for part in (ids[:, :first], ids[:, first:]):
            if part.shape[1]:
                once.append(loaded.model(part, past_key_values=whole).logits)
    assert (torch.cat(parts, 1) - torch.cat(once, 1)).abs().max() < 1e-5
    if policy.budgets.kind == "uniform" and not first:  # else layers peak at different steps
        _, stepped = stepwise(loaded, policy, IDS)
        assert stepped.bytes_peak_resident == text_bytes(sizes, flags).peak


def test_ordinary_tokens_go_before_anchors_and_the_oldest_first() -> None:
    policy = Policy(slots=7, sinks=1, recent_window=1, anchors=Anchors(at="given", ids=(0,)))
    part = layout(policy, tiny().shape).layers[0]
    flags = np.zeros(20, dtype=bool)
    flags[[2, 4, 6, 8]] = True

    def held(tokens: int) -> list[int]:
        return course(part, flags[:tokens]).end.tokens.tolist()

    assert held(3) == [0, 2] and held(6) == [0, 2, 4, 5]
    assert held(9) == [0, 2, 4, 6, 8] and held(10) == [0, 2, 4, 6, 8, 9]
    assert held(14) == [0, 2, 4, 6, 8, 13]  # ordinary tokens first
    flags[9:13] = True
    assert held(13) == [0, 8, 9, 10, 11, 12]  # then the oldest anchors


def test_rows_of_a_batch_share_their_anchors_or_are_refused(loaded: LoadedModel) -> None:
    policy, both = BY_AGE["sinks and a recent window"], np.concatenate([IDS, IDS])
    both[1, ~FLAGS] = (both[1, ~FLAGS] + 40) % 97
    both[1, np.isin(both[1], A) & ~FLAGS] = 50
    with torch.inference_mode():
        got = loaded.model(
            torch.from_numpy(both), past_key_values=PolicyCache(policy, loaded.model)
        ).logits
        for row in range(2):
            ids = torch.from_numpy(both[row : row + 1])
            alone = loaded.model(ids, past_key_values=PolicyCache(policy, loaded.model)).logits
            assert (got[row] - alone[0]).abs().max() < 1e-9
    both[1, 5] = 20
    with pytest.raises(PolicyError, match="one sequence at a time"), torch.inference_mode():
        loaded.model(torch.from_numpy(both), past_key_values=PolicyCache(policy, loaded.model))
    assert Evaluator(loaded, batch=2).quality(policy, both).nll.shape == (2, T - 1)


def test_embeddings_instead_of_ids_are_refused(loaded: LoadedModel) -> None:
    cache = PolicyCache(BY_AGE["as published"], loaded.model)
    embeds = loaded.model.get_input_embeddings()(torch.from_numpy(IDS))
    with pytest.raises(PolicyError, match="give input_ids"), torch.inference_mode():
        loaded.model(inputs_embeds=embeds, past_key_values=cache)


def test_generate_closes_sequences_as_the_greedy_loop_does(loaded: LoadedModel) -> None:
    policy, ids = BY_AGE["sinks and a recent window"], torch.from_numpy(IDS[:, :40])
    cache = PolicyCache(policy, loaded.model)
    more: Any = dict(max_new_tokens=30, do_sample=False, pad_token_id=0, eos_token_id=None)
    got = loaded.model.generate(
        ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **more
    )
    again, by_hand = ids, PolicyCache(policy, loaded.model)
    with torch.inference_mode():
        step = ids
        for _ in range(30):
            step = loaded.model(step, past_key_values=by_hand).logits[:, -1:].argmax(-1)
            again = torch.cat([again, step], 1)
    flags = np.isin(got[0, :-1].numpy(), A)
    assert torch.equal(got, again) and flags[40:].any()
    assert cache.bytes_resident == text_bytes(layout(policy, loaded.shape), flags).end


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["in 4 bits", "by rule"])
def test_no_device_is_waited_for(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSEARCH_TRITON", "0")
    holds(ALL[name], way, WAYS[way][2], Device())


# -- marks, new tokens and the command line ------------------------------------------------------

WORDS = "One is here. Two (Mr. X) left! Then nothing. " * 12


@pytest.fixture(scope="module")
def small(tiny_folder: Path) -> LoadedModel:
    found = load_model(str(tiny_folder), announce=lambda _: None)
    return replace(found, model=found.model.double(), dtype="float64")


def ids_of(loaded: LoadedModel, text: str) -> np.ndarray:
    return np.asarray(loaded.tokenizer(text)["input_ids"])[None]


def test_marks_are_found_by_the_text_of_tokens(small: LoadedModel) -> None:
    ids = ids_of(small, WORDS[:90])
    dot, bang = small.tokenizer(".!")["input_ids"]
    assert endings(small.tokenizer, [".", "!"]).tolist() == sorted([dot, bang])
    ends = Policy(anchors=Anchors(marks=(".", "!")))
    same = Policy(anchors=Anchors(at="given", ids=(dot, bang)))
    a, b = (Evaluator(small).quality(p, ids) for p in (ends, same))
    assert np.array_equal(a.nll, b.nll) and a.anchored == b.anchored
    assert a.anchored is not None and a.anchored.count == sum(c in ".!" for c in WORDS[:90])
    with pytest.raises(PolicyError, match=r"marks: no token .* ends in '§§'"):
        PolicyCache(Policy(anchors=Anchors(marks=("§§",))), small.model, tokenizer=small.tokenizer)
    with pytest.raises(PolicyError, match="give the tokenizer"):
        PolicyCache(ends, small.model)


@pytest.mark.slow
@pytest.mark.real
def test_full_stops_of_the_real_model_are_many_tokens(real_model: LoadedModel) -> None:
    found = {*endings(real_model.tokenizer, ["."]).tolist()}
    assert {30, 1673} <= found and 28 not in found and 1270 not in found  # . and ␣. but not ."
    policy = Policy(sinks=4, anchors=Anchors())
    ids = ids_of(real_model, "It is so . And Dr. No said so . Then it rained. " * 3)
    slow, cache = stepwise(real_model, policy, ids, native=torch.float32)
    quality = Evaluator(real_model).quality(policy, ids, native=torch.float32)
    assert np.abs(slow - quality.nll).max() < 1e-4
    assert quality.anchored is not None and quality.anchored.count == 12
    assert cache.groups[0].store.n == 4 + 12


@pytest.mark.parametrize("embedding", ["copy", "mean"])
def test_new_tokens_are_fed_and_only_the_text_is_scored(embedding: Any, small: LoadedModel) -> None:
    window = ids_of(small, WORDS[:120])[0]
    policy = Policy(anchors=Anchors(at="sentences", insert=True, embedding=embedding), sinks=1)
    fed = feed(small, policy, window)
    new = np.setdiff1d(np.arange(len(fed.ids)), fed.places)
    assert {*fed.ids[new].tolist()} == {257 + (embedding == "mean")}
    assert np.array_equal(fed.ids[fed.places], window)
    before = WORDS[:120][: int(new[1]) - 1]  # the first new token is not of the text
    assert before.endswith("left!") and len(new) == len(sentence_ends(small.tokenizer, window))

    flags = np.zeros(len(fed.ids), dtype=bool)
    flags[new] = True
    table = small.model.get_input_embeddings().weight
    dot = table[int(endings(small.tokenizer, ["."])[0])]
    rows = table[torch.from_numpy(np.minimum(fed.ids, 256))].clone()
    rows[new] = dot if embedding == "copy" else table.mean(0)
    visible, _ = seen(policy, flags)
    with torch.inference_mode():
        logits = small.model(
            inputs_embeds=rows[None], attention_mask=visible[None, None], use_cache=False
        ).logits.log_softmax(-1)[0]
    want = -logits[fed.places[1:] - 1].gather(1, torch.from_numpy(window[1:, None]))[:, 0].numpy()

    exact = dict(native=torch.float64)
    quality = Evaluator(small).quality(policy, window[None], **exact)
    slow, cache = stepwise(small, policy, window[None], **exact)
    assert np.abs(quality.nll[0] - want).max() < 1e-5 and np.abs(slow[0] - want).max() < 1e-5
    assert quality.anchored is not None and quality.anchored.tokens == len(fed.ids)
    plain = Evaluator(small).quality(Policy(), window[None], resident=False, **exact)
    assert plain.nll.shape == quality.nll.shape and cache.bytes_resident > 0


@pytest.mark.parametrize(("text", "count"), [(WORDS * 2, 56), ("No mark at all, " * 40, 0)])
def test_eval_counts_anchors_and_warns_of_none(
    text: str, count: int, small: LoadedModel, capfd: Any
) -> None:
    found = evaluate(["anllm-ep", "anllm-ac"], small, Text(text, "t"), context=400, progress=True)
    said = [x for x in capfd.readouterr().err.splitlines() if " anchors in 1 windows of 400" in x]
    counts = [int(x.split()[1]) for x in said]
    assert [("warning" in x) for x in said] == [not c for c in counts]
    assert (counts[0] > 0) == (count > 0)
    for row, many in zip(found.rows, counts, strict=True):
        assert row.bytes_peak == row.bytes_asked >= max(row.bytes_resident, row.bytes_peak_text)
        assert (row.bytes_mean < 0.5 * row.bytes_peak) == (many > 0) or not many


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (dict(slots=20, ladder=Ladder(span=0.5), anchors=given()), "ladder"),
        (dict(slots=20, rule=Attention(), anchors=given(close=False)), "anchors.close"),
        (dict(slots=20, rule=Attention(), anchors=given(protected=(5, 9))), "anchors.protected"),
        (dict(anchors={"at": "sentences"}), "needs insert"),
        (dict(anchors={"at": "given"}), "needs ids"),
        (dict(anchors={"marks": [" ."]}), "blanks"),
        (dict(anchors={"protected": [4, 4]}), "no tokens"),
    ],
)
def test_what_does_not_go_together_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(PolicyError, match=said):
        Policy.build(fields)


def test_shapes_prompts_files_and_knobs(loaded: LoadedModel) -> None:
    with pytest.raises(PolicyError, match="30 protected tokens"):
        check(Policy(slots=20, anchors=given(protected=(0, 30))), loaded.shape)
    kept = Policy(anchors=given(protected="prompt"))
    with pytest.raises(PolicyError, match="say how long"):
        check(kept, loaded.shape, prompt=0)
    with pytest.raises(PolicyError, match=r"prompt of 40 tokens in full, .* 41 slots and has 40"):
        one_pass = Evaluator(loaded, batch=1)
        one_pass.quality(kept.model_copy(update={"slots": 40}), IDS, prompt=40)
    for policy in ALL.values():
        assert Policy.parse(policy.to_json()) == policy and describe(policy)
    assert len({p.fingerprint() for p in ALL.values()}) == len(ALL)
    setting = Setting(loaded.shape, loaded.shape.budget_bytes(40), T)
    knobs: dict[str, Any] = {"anchors": "ac", "anchors.every": 16, "tiers": "k8v8", "interval": 8}
    built = build(knobs, setting)
    assert built.anchors == Anchors(at=16, insert=True)
    assert layout(built, loaded.shape).bytes_peak(T) <= setting.budget_bytes
    more = built.model_copy(update={"slots": (built.slots or 0) + 1})
    assert layout(more, loaded.shape).bytes_peak(T) > (setting.budget_bytes or 0)


def test_flags_follow_the_stream() -> None:
    stream = Stream(lambda ids, _: ids == 1)
    stream.update(torch.tensor([[1, 0, 1]]), 0)
    stream.update(torch.tensor([[0, 1]]), 3)
    assert stream.flags(1, 4).tolist() == [False, True, False, True]
    stream.update(torch.tensor([[1]]), 1)  # a new stream, or another try
    assert stream.flags(0, 2).tolist() == [True, True]
