"""A prompt that is read again (KVzip): scores by the paper's formula, and who keeps how much."""

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from kvsearch import policy_space as space
from kvsearch.cache import PolicyCache
from kvsearch.errors import PolicyError
from kvsearch.exporters import find
from kvsearch.exporters.project import project
from kvsearch.policy import Budgets, HeadTiers, Policy, Quantizer, Tier, layout
from kvsearch.policy_space.methods import METHODS
from kvsearch.rules import Reread, Rule, Slots
from kvsearch.rules.reread import RereadScorer
from kvsearch.workloads import Ask, Item
from kvsearch.workloads.items import ids
from tests.cache_cases import IDS, sharp, tiny
from tests.tokenizer_kinds import kind

PROMPT, MODEL, SINKS = torch.from_numpy(IDS[:1, :90]), tiny(layers=3).model, 3
GLOBAL = Budgets(kind="adakv", floor=0, across="model")


def words(text: str, add_special_tokens: bool = True, verbose: bool = True) -> dict[str, list[int]]:
    """A tokenizer: a token for every word."""
    assert not add_special_tokens
    return {"input_ids": [len(word) for word in text.split(" ")]}


@pytest.fixture
def ranked(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """Ranks `[H, N]` that the scorers gave, shallow to deep."""
    found, plain = list[np.ndarray](), RereadScorer.ranks

    def ranks(self: RereadScorer, slots: Slots) -> Tensor:
        found.append(plain(self, slots)[0].numpy())
        return plain(self, slots)

    monkeypatch.setattr(RereadScorer, "ranks", ranks)
    return found


def taken(policy: Policy, model: Any = MODEL, prompt: Tensor = PROMPT, **more: Any) -> PolicyCache:
    cache = PolicyCache(policy, model, native=torch.float64, **more)
    with torch.inference_mode():
        model(prompt, past_key_values=cache)
    return cache


def attended(again: Tensor) -> np.ndarray:
    """Attention of tokens after the prompt over everything so far `[layers, H, G, M, N]`."""
    eager = tiny(layers=3).model
    eager.set_attn_implementation("eager")
    with torch.inference_mode():
        out = eager(torch.cat([PROMPT, again], 1), output_attentions=True).attentions
    rows = np.stack([x[0].numpy() for x in out])[:, :, PROMPT.shape[1] :]
    return rows.reshape(3, 2, 3, *rows.shape[2:])


def test_a_score_is_the_most_attention_of_the_second_reading(ranked: list[np.ndarray]) -> None:
    taken(Policy(slots=50, sinks=SINKS, trigger="prompt", rule=Reread()))
    want = attended(PROMPT)[..., : PROMPT.shape[1]].max((2, 3))
    np.testing.assert_allclose(np.stack(ranked), want, rtol=1e-5)


def test_instructions_come_before_and_chunks_compete_with_sinks_and_themselves(
    ranked: list[np.ndarray],
) -> None:
    policy = Policy(
        slots=50, sinks=SINKS, trigger="prompt", rule=Reread(instruction="repeat", chunk=40)
    )
    taken(policy, tokenizer=words)
    first = [*map(len, "\n\nRepeat the previous context exactly.\n".split(" "))]
    later = "\n\nRepeat the part of the previous context exactly, starting with".split(" ")
    want = np.zeros((3, 2, PROMPT.shape[1]))
    for start, stop in ((0, 40), (40, 80), (80, 90)):
        before = [*map(len, later), *PROMPT[0, start - 8 : start].tolist(), 1] if start else first
        again = torch.cat([torch.tensor([before]), PROMPT[:, start:stop]], 1)
        p = attended(again)
        own = range(PROMPT.shape[1], p.shape[-1])
        rivals = [*range(min(SINKS, start)), *range(start, stop), *own]
        p = p / p[..., rivals].sum(-1, keepdims=True)
        want[..., start:stop] = p[..., start:stop].max((2, 3))
    np.testing.assert_allclose(np.stack(ranked), want, rtol=1e-5)


@pytest.mark.parametrize("name", ["llama 2, legacy", "metaspace always", "gpt2, space", "llama 3"])
def test_instructions_are_tokens_of_a_text_that_goes_on(name: str) -> None:
    tokenizer, read = kind(name), list[list[int]]()
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    model = LlamaForCausalLM(config).double()
    model.model.register_forward_pre_hook(
        lambda _, args, given: read.append(given["input_ids"][0].tolist()), with_kwargs=True
    )
    text, told = "The code of the lamp is 10007", "\n\nRepeat the previous context exactly.\n"
    policy = Policy(slots=20, trigger="prompt", rule=Reread(instruction="repeat"))
    prompt = tokenizer(text)["input_ids"]
    taken(policy, model, torch.tensor([prompt]), tokenizer=tokenizer)
    assert [*prompt, *read[-1]] == [*tokenizer(text + told)["input_ids"], *prompt]


def test_one_threshold_serves_all_heads_of_the_model(ranked: list[np.ndarray]) -> None:
    policy = Policy(slots=41, sinks=SINKS, trigger="prompt", rule=Reread(), budgets=GLOBAL)
    cache, full = taken(policy), taken(Policy())
    scores = np.concatenate(ranked)[:, SINKS:]  # of each head
    best = np.sort(scores.flatten())[-(40 - SINKS) * len(scores) :][0]
    sizes = set()
    values = [v for group in full.groups for v in group.store.read()[1][0]]
    for own, group, every in zip(scores, cache.groups, values, strict=True):
        kept = [*range(SINKS), *(np.flatnonzero(own >= best) + SINKS)]
        sizes.add(len(kept))
        assert torch.equal(group.store.read()[1][0, 0], every[kept])
    assert len(sizes) > 2
    assert cache.bytes_resident == 40 / 90 * full.bytes_resident


def windowed() -> PreTrainedModel:
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=97, hidden_size=48, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=6, num_key_value_heads=2, head_dim=16, sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
        max_position_embeddings=512,
    )  # fmt: skip
    return sharp(Gemma2ForCausalLM(config).double())


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("chunk", [2048, 33])
def test_where_nothing_has_to_go_the_second_reading_leaves_no_trace(
    chunk: int, packed: bool
) -> None:
    """Neither in the policy's layers nor in those with a sliding window."""
    model, later = windowed(), torch.from_numpy(IDS[:1, 90:120])
    policy = Policy(slots=91, trigger="prompt", rule=Reread(chunk=chunk))
    cache = taken(policy, model, packed=packed)
    theirs = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(PROMPT, past_key_values=theirs)
        for x in later.split([20, 1, 9], 1):
            got, want = (model(x, past_key_values=c).logits for c in (cache, theirs))
            assert (got - want).abs().max() < 1e-5


def test_generate_reads_again_by_itself_and_every_row_of_a_batch_alone() -> None:
    policy = Policy(slots=40, trigger="prompt", rule=Reread())
    both, new = torch.from_numpy(IDS[:, :90]), 12
    more: Any = dict(do_sample=False, max_new_tokens=new, attention_mask=torch.ones_like(both))
    said = MODEL.generate(both, past_key_values=PolicyCache(policy, MODEL), **more)
    for row in range(2):
        cache, ids = PolicyCache(policy, MODEL), both[row : row + 1]
        step = ids
        with torch.inference_mode():
            for _ in range(new):
                step = MODEL(step, past_key_values=cache).logits[:, -1:].argmax(-1)
                ids = torch.cat([ids, step], 1)
        assert torch.equal(said[row : row + 1], ids)
        assert cache.groups[0].store.n == 39 + new - 1


def test_heads_that_rank_nothing_are_compacted_beside_those_that_do() -> None:
    """Those with one tier; where the model's first head was one, nothing was read or compacted."""
    one = (Tier(key_bits=8, value_bits=8),)
    two = tuple(Tier(share=0.5, key_bits=bits, value_bits=bits) for bits in (8, 4))
    of = ((0, 1), (1, 1), (0, 0))
    policy = Policy(
        trigger="prompt", rule=Reread(), tiers=one, quantizer=Quantizer(group=16),
        head_tiers=HeadTiers(others=(two,), of=of),
    )  # fmt: skip
    cache = taken(policy)
    assert cache.bytes_resident == layout(policy, cache.shape).bytes_at(90, 90)


def test_tokens_that_are_read_twice_count_twice() -> None:
    asks = (
        Ask(ids([1, 2]), ids([3])),
        Ask(ids([4]), ids([5]), follows=True),
        Ask(ids([]), ids([6])),
    )
    item = Item("a", "a", ids(range(10)), asks)
    assert item.taken_in("agnostic") == 16 and item.taken_in("aware") == 26
    assert item.taken_in("agnostic", again=True) == 26
    assert item.taken_in("aware", again=True) == 26 + 22


RULE: Rule = Reread()


def test_a_server_that_reads_once_evicts_by_age() -> None:
    policy = Policy(slots=40, trigger="prompt", rule=RULE, budgets=GLOBAL)
    given = project(policy, find("vllm"))
    assert (given.trigger, given.rule, given.slots) == ("prompt", None, 40)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (dict(trigger="stream"), "rule 'reread' reads the prompt again and needs trigger 'prompt'"),
        (dict(trigger="prompt+stream"), "needs trigger 'prompt', got 'prompt\\+stream'"),
        (
            dict(rule={"name": "key-norm"}, budgets=GLOBAL),
            "budgets.across 'model' needs rule 'reread'",
        ),
        (dict(budgets=dict(across="model")), "across 'model' goes with kind 'adakv'"),
    ],
)
def test_what_does_not_go_together_is_one_sentence(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(PolicyError, match=said) as e:
        Policy.build({"slots": 40, "trigger": "prompt", "rule": RULE, **fields})
    assert "\n" not in str(e.value)


def test_what_cannot_be_read_again_is_one_sentence(tmp_path: Any) -> None:
    policy = Policy(slots=40, trigger="prompt", rule=Reread())
    cache, embed = PolicyCache(policy, MODEL), MODEL.get_input_embeddings()
    with pytest.raises(PolicyError, match="brings no token ids; give input_ids instead of embed"):
        MODEL(inputs_embeds=embed(PROMPT), past_key_values=cache)
    long = torch.from_numpy(IDS[:1].repeat(2, 1))
    said = "of 336 tokens again, up to position 672, and the model's positions reach 512"
    with pytest.raises(PolicyError, match=re.escape(said)):
        taken(policy, prompt=long)
    taken(policy.model_copy(update={"rule": Reread(chunk=150)}), prompt=long)
    told = Policy(slots=40, trigger="prompt", rule=Reread(instruction="repeat"))
    with pytest.raises(PolicyError, match="give it, as in PolicyCache"):
        PolicyCache(told, MODEL)


def test_the_space_for_prompts_has_the_method() -> None:
    found, knobs = space.load("prompts"), METHODS["kvzip"].knobs
    assert found.params(knobs) is not None and found.forbidden(knobs) is None
    assert found.forbidden({**knobs, "trigger": "stream"}) is not None
    assert found.forbidden({**knobs, "rule": "snapkv", "interval": 32}) is not None
