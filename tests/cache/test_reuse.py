"""One cache, several calls: what goes on with its sequence, and what does not and is refused.

And the model beside it: a cache changes nothing for another use of the model.
"""

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor
from transformers import (
    ContinuousBatchingConfig,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    pipeline,
)

from kvsearch.cache import PolicyCache
from kvsearch.errors import KvsearchError, ModelError
from kvsearch.policy import Anchors, Ladder, Policy, Quantizer, Tier
from kvsearch.rules import Attention
from tests.cache_cases import sharp

K4 = dict(tiers=(Tier(key_bits=4, value_bits=4),), quantizer=Quantizer(group=8))
POLICIES = {
    "full": Policy(),
    "window": Policy(slots=256, interval=8),
    "window re-indexed": Policy(slots=256, sinks=4, interval=8, positions="cache"),
    "h2o in 4 bits": Policy(slots=256, recent_window=4, interval=4, rule=Attention(), **K4),
    "ladder": Policy(slots=64, sinks=2, recent_window=4, interval=4, ladder=Ladder(span=0.5)),
    "prompt": Policy(
        slots=200, recent_window=4, interval=8, trigger="prompt", rule=Attention(pool=3)
    ),
    "anchors": Policy(anchors=Anchors(at=9)),
}
FEW = ("window re-indexed", "h2o in 4 bits", "prompt", "anchors")  # one for each way
KW: dict[str, Any] = dict(do_sample=False, max_new_tokens=6, pad_token_id=0)
IDS = torch.randint(3, 97, (2, 40), generator=torch.Generator().manual_seed(1))
ONE = IDS[:1]


def made(**more: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = dict(
        vocab_size=97, hidden_size=48, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=6, num_key_value_heads=2, head_dim=16, max_position_embeddings=512,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = sharp(LlamaForCausalLM(LlamaConfig(**sizes | more)))
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return made()


def generate(model: Any, ids: Tensor, cache: Any, **more: Any) -> Tensor:
    more = {"attention_mask": torch.ones_like(ids), **KW, **more}
    found: Tensor = model.generate(ids, past_key_values=cache, **more)
    return found


def said(call: Callable[[], object]) -> str:
    """The one sentence with which a call is refused."""
    with pytest.raises(KvsearchError) as caught:
        call()
    sentence = str(caught.value)
    assert "\n" not in sentence and ". " not in sentence
    return sentence


@pytest.mark.parametrize("name", FEW)
def test_use_cache_false_is_named(name: str, model: PreTrainedModel) -> None:
    mine = copy.deepcopy(model)

    def fresh() -> PolicyCache:
        return PolicyCache(POLICIES[name], mine)

    want = generate(mine, IDS, fresh())
    for how in (dict(), dict(num_beams=2), dict(do_sample=True, top_k=1)):
        sentence = said(lambda how=how: generate(mine, IDS, fresh(), use_cache=False, **how))
        assert "use_cache is False" in sentence and "reset()" in sentence
    alone = generate(mine, IDS, fresh(), use_cache=False, max_new_tokens=1)  # one call: no harm
    assert torch.equal(alone, want[:, :41])
    mine.config.use_cache = mine.generation_config.use_cache = False  # as a checkpoint has it
    cache = fresh()
    assert "use_cache=True" in said(lambda: generate(mine, IDS, cache))
    cache.reset()
    assert torch.equal(generate(mine, IDS, cache, use_cache=True), want)


@pytest.mark.parametrize("name", FEW)
def test_a_prompt_that_was_taken_in_is_named(name: str, model: PreTrainedModel) -> None:
    cache, want = PolicyCache(POLICIES[name], model), None
    with torch.inference_mode():
        model(IDS, past_key_values=cache)
    for more in ({}, {"attention_mask": None}):
        sentence = said(lambda more=more: generate(model, IDS, cache, **more))
        assert "taken in already" in sentence and "reset()" in sentence
    with torch.inference_mode():  # by hand, with positions from the start
        places = torch.arange(40)[None]
        again = said(lambda: model(IDS, position_ids=places, past_key_values=cache))
        assert "taken in already" in again
        longer, where = torch.cat([IDS, IDS[:, :1]], 1), torch.arange(41)[None]
        loop = said(lambda: model(longer, position_ids=where, past_key_values=cache))
        assert "whole sequence again" in loop
    cache.reset()
    want = generate(model, IDS, cache)
    other = PolicyCache(POLICIES[name], model)
    with torch.inference_mode():
        model(IDS[:, :30], past_key_values=other)
    for ids in (IDS, IDS.flip(1)):  # transformers would give the rest, whichever the first were
        assert "cannot compare this prompt" in said(lambda ids=ids: generate(model, ids, other))
    if not POLICIES[name].after_prompt:  # its prompt would be another one
        rest = generate(model, IDS[:, 30:], other, attention_mask=torch.ones_like(IDS))
        assert torch.equal(rest, want[:, 30:])
        other.reset()
        generate(model, IDS[:, :30], other, max_new_tokens=1)
        assert torch.equal(generate(model, IDS, other), want)


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("length", [39, 45, 46])  # the cache has seen 45
def test_a_cache_of_another_prompt_is_named(name: str, length: int, model: PreTrainedModel) -> None:
    """As in a loop over prompts: a longer one got the end of its own after the other's tokens."""
    cache = PolicyCache(POLICIES[name], model)
    generate(model, ONE, cache)
    other = torch.randint(3, 97, (1, length), generator=torch.Generator().manual_seed(2))
    for more in ({}, {"attention_mask": None}):
        assert "reset()" in said(lambda more=more: generate(model, other, cache, **more))
    cache.reset()
    want = generate(model, other, PolicyCache(POLICIES[name], model))
    assert torch.equal(generate(model, other, cache), want)
    also = torch.cat([want, other[:, :5]], 1)
    first = (also[:, :1] - 2) % 94 + 3
    changed = torch.cat([first, also[:, 1:]], 1)
    assert "token 0 of this prompt" in said(lambda: generate(model, changed, cache))


@pytest.mark.parametrize("name", POLICIES)
def test_a_conversation_goes_on_in_every_way(name: str, model: PreTrainedModel) -> None:
    """Whole conversations, new tokens alone with a mask for all, pieces, and calls by hand."""
    policy, new = POLICIES[name], ONE[:, :7]
    cache, by_hand = (PolicyCache(policy, model) for _ in range(2))
    text, want = generate(model, ONE, cache), generate(model, ONE, by_hand)
    for turn in range(3):
        text = torch.cat([text, new + turn], 1)
        steps: list[Tensor] = []
        with torch.inference_mode():
            call = text[:, by_hand.get_seq_length() :]
            for _ in range(6):
                call = model(call, past_key_values=by_hand).logits[:, -1:].argmax(-1)
                steps.append(call)
        want = torch.cat([text, *steps], 1)
        if turn == 1:
            seen = cache.get_seq_length()
            mask = torch.ones(1, text.shape[1], dtype=torch.long)
            fresh = generate(model, text[:, seen:], cache, attention_mask=mask)
            text = torch.cat([text[:, :seen], fresh], 1)
        else:
            text = generate(model, text, cache)
        assert torch.equal(text, want)


@pytest.mark.parametrize("name", FEW)
def test_rows_that_beams_reorder_are_compared(name: str, model: PreTrainedModel) -> None:
    cache = PolicyCache(POLICIES[name], model)
    both = generate(model, ONE, cache, num_beams=2, num_return_sequences=2)
    assert not torch.equal(both[:1], both[1:])
    other = IDS[:, :38].roll(1, 0).repeat(1, 2)
    sentence = said(lambda: generate(model, other, cache))
    assert "is another one than the cache took in" in sentence
    cache.reset()
    generate(model, ONE, cache, max_new_tokens=1)
    cache.batch_repeat_interleave(2)
    assert "token 0 of this prompt" in said(lambda: generate(model, other, cache))
    cache.batch_select_indices(torch.tensor([1]))
    assert generate(model, torch.cat([ONE, ONE], 1), cache).shape[1] == 86


@pytest.mark.parametrize("name", ["window", "prompt"])
def test_prompts_in_pieces(name: str, model: PreTrainedModel) -> None:
    """`prefill_chunk_size` is one call's; where the prompt matters, it is refused."""
    cache = PolicyCache(POLICIES[name], model)
    if name == "prompt":
        assert "prefill_chunk_size" in said(
            lambda: generate(model, ONE, cache, prefill_chunk_size=16)
        )
        return
    text = generate(model, ONE, cache, prefill_chunk_size=16)
    assert torch.equal(text, generate(model, ONE, PolicyCache(POLICIES[name], model)))
    text = torch.cat([text, ONE], 1)
    again = generate(model, text, cache, prefill_chunk_size=16)
    assert again.shape[1] == text.shape[1] + 6
    changed = torch.cat([again[:, :80] % 94 + 3, again], 1)
    assert "reset()" in said(lambda: generate(model, changed, cache, prefill_chunk_size=16))


def test_a_mask_that_lacks_the_past_is_named(model: PreTrainedModel) -> None:
    cache = PolicyCache(POLICIES["window"], model)
    with torch.inference_mode():
        model(ONE, past_key_values=cache)
        hiding = torch.ones(1, 1, 5, 45, dtype=torch.bool).tril(40)
        hiding[..., 3] = False
        sentence = said(lambda: model(ONE[:, :5], attention_mask=hiding, past_key_values=cache))
        assert "this mask hides some" in sentence
        short = torch.ones(1, 41, dtype=torch.long)
        whole = torch.cat([ONE, ONE[:, :1]], 1)
        sentence = said(lambda: model(whole, attention_mask=short, past_key_values=cache))
        assert "40 tokens that the cache has seen" in sentence and "reset()" in sentence


def test_a_pipeline_answers_one_prompt_a_cache(
    model: PreTrainedModel, tiny_tokenizer: Any, tiny_folder: Path
) -> None:
    mine = transformers.AutoModelForCausalLM.from_pretrained(tiny_folder).eval()
    mine.generation_config.eos_token_id = mine.config.eos_token_id = None
    ask = pipeline("text-generation", model=mine, tokenizer=tiny_tokenizer)
    prompts = ["One prompt and its answer.", "Another prompt, which is a bit longer than that."]
    cache = PolicyCache(Policy(slots=40, sinks=2, interval=4), mine)
    more: Any = dict(max_new_tokens=5, do_sample=False, past_key_values=cache)
    assert "reset()" in said(lambda: ask(prompts, **more))
    found = []
    for prompt in prompts:
        cache.reset()
        found.append(ask(prompt, **more)[0]["generated_text"])
    for prompt, text in zip(prompts, found, strict=True):
        more["past_key_values"] = PolicyCache(Policy(slots=40, sinks=2, interval=4), mine)
        assert ask(prompt, **more)[0]["generated_text"] == text


@pytest.mark.parametrize("name", ["full", "window re-indexed", "prompt"])
@pytest.mark.parametrize("how", ["eager", "sdpa"])
def test_a_cache_changes_nothing_of_the_model(name: str, how: str) -> None:
    """Not its attention maps, its config, its pickle, nor what it computes with other caches."""
    model = made()
    model.set_attn_implementation(how)

    def state() -> tuple[object, ...]:
        more: Any = {"output_attentions": True} if how == "eager" else {}
        with torch.inference_mode():
            out = model(IDS, past_key_values=DynamicCache(config=model.config), **more)
        maps = [x.numpy().tobytes() for x in out.attentions or ()]
        assert len(maps) == (2 if how == "eager" else 0)
        padded = torch.ones_like(IDS)
        padded[0, :3] = 0
        text = [model.generate(IDS, attention_mask=m, **KW).tolist() for m in (None, padded)]
        held = [sorted(vars(x)) for x in model.modules()]
        hooks = [len(x._forward_hooks) + len(x._forward_pre_hooks) for x in model.modules()]
        # transformers' own hooks for attention maps are no data
        data = pickle.dumps(model if how == "sdpa" else model.config)
        return maps, out.logits.numpy().tobytes(), text, held, hooks, data

    before = state()
    cache = PolicyCache(POLICIES[name], model)
    assert state() == before
    alone = model.generate(IDS[:1, 3:], **KW)[0, 37:].tolist()
    assert before[2][1][0][40:] == alone  # type: ignore[index]  # padding is no trouble either
    generate(model, IDS, cache)
    assert state() == before and b"kvsearch" not in before[-1]  # type: ignore[operator]
    with pytest.raises(ModelError):  # an error on the way leaves nothing behind either
        generate(model, IDS[:1], cache)
    assert state() == before


def test_batches_are_generated_beside_a_cache() -> None:
    """transformers' continuous batching knows attention implementations by their names."""
    model = made()
    want = model.generate(ONE, **KW)[0, 40:].tolist()
    PolicyCache(POLICIES["h2o in 4 bits"], model)
    config = transformers.GenerationConfig(**KW, eos_token_id=-1)
    few = ContinuousBatchingConfig(num_blocks=4, max_batch_tokens=256)  # else most of the memory
    found = model.generate_batch(
        [ONE[0].tolist()], generation_config=config, continuous_batching_config=few
    )
    assert [x.generated_tokens for x in found.values()] == [want]


@pytest.mark.parametrize("name", ["h2o in 4 bits", "anchors"])
def test_threads_that_share_a_model_have_each_their_cache(
    name: str, model: PreTrainedModel
) -> None:
    prompts = [torch.roll(ONE, i, 1) for i in range(4)]
    want = [generate(model, x, PolicyCache(POLICIES[name], model)) for x in prompts]
    caches = [PolicyCache(POLICIES[name], model) for _ in prompts]
    plain = model.generate(ONE, **KW)
    with ThreadPoolExecutor(5) as pool:
        other = pool.submit(model.generate, ONE, **KW)
        found = list(pool.map(lambda x, cache: generate(model, x, cache), prompts, caches))
    assert all(map(torch.equal, found, want)) and torch.equal(other.result(), plain)


@pytest.mark.slow  # half a minute for torch to begin to compile
@pytest.mark.parametrize("name", ["h2o in 4 bits", "anchors"])
def test_a_compiled_model_takes_a_cache(name: str) -> None:
    model = made(num_hidden_layers=1)  # of which each call is compiled anew
    compiled = torch.compile(model, backend="eager")
    cache = PolicyCache(POLICIES[name], compiled)
    by_hand = PolicyCache(POLICIES[name], model)
    with torch.inference_mode():
        for call in (ONE[:, :20], ONE[:, 20:21], ONE[:, 21:]):
            got = compiled(call, past_key_values=cache).logits
            assert torch.equal(got, model(call, past_key_values=by_hand).logits)


@pytest.mark.parametrize("name", ["full", "h2o in 4 bits", "anchors"])
def test_adapted_models_attend_through_a_cache(name: str) -> None:
    """Adapters of every kind that transformers' layers keep; a prefix is a cache of its own."""
    lora = dict(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    ia3 = dict(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    mixed = peft.get_peft_model(made(), peft.LoraConfig(**lora), mixed=True).eval()
    text = generate(mixed, ONE, PolicyCache(POLICIES[name], mixed, native=torch.float32))
    if name == "full":
        assert torch.equal(text, generate(mixed, ONE, None))
    for config in (
        peft.LoraConfig(**lora), peft.LoraConfig(task_type="CAUSAL_LM", **lora),
        peft.IA3Config(task_type="CAUSAL_LM", **ia3),
        peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5),
    ):  # fmt: skip
        model = peft.get_peft_model(made(), config).eval()
        cache = PolicyCache(POLICIES[name], model, native=torch.float32)
        if name == "anchors" and isinstance(config, peft.PromptTuningConfig):
            assert "token ids" in said(lambda model=model, cache=cache: generate(model, ONE, cache))
            continue
        text = generate(model, ONE, cache)
        if name == "full":  # which drops and rounds nothing
            assert torch.equal(text, model.generate(ONE, **KW))
        turn = torch.cat([text, ONE], 1)
        if isinstance(config, peft.PromptTuningConfig):
            assert "5 tokens of its own" in said(
                lambda model=model, turn=turn, cache=cache: generate(model, turn, cache)
            )
            continue
        assert generate(model, turn, cache).shape[1] == turn.shape[1] + 6
        assert "reset()" in said(
            lambda model=model, cache=cache: generate(model, ONE.flip(1), cache)
        )
    prefix = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    tuned = peft.get_peft_model(made(), prefix)
    assert "PREFIX_TUNING" in said(lambda: PolicyCache(POLICIES[name], tuned))


def test_what_hides_positions_is_named(model: PreTrainedModel) -> None:
    """The reason was that layers turn their keys in another way, which nothing had looked at."""
    mine = copy.deepcopy(model)
    plain = mine.base_model.forward
    mine.base_model.forward = lambda input_ids, past_key_values=None, use_cache=None: plain(
        input_ids, past_key_values=past_key_values, use_cache=use_cache
    )
    sentence = said(lambda: PolicyCache(POLICIES["window re-indexed"], mine))
    assert "takes no position_ids" in sentence and "use positions 'original'" in sentence
