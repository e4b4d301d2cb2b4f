"""`model.generate(past_key_values=PolicyCache(...))`: what a user runs, against loops by hand."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import accelerate
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvsearch.cache import PolicyCache
from kvsearch.errors import ModelError, PolicyError
from kvsearch.policy import Anchors, Policy, Quantizer, Tier, layout
from kvsearch.rules import Critical
from tests.generation import NEW, POLICIES, PROMPT, make

FEW = ("window re-indexed", "tiers", "ragged heads, bits per layer")


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make()


def generate(model: PreTrainedModel, ids: Tensor, cache: Any, new: int = NEW, **more: Any) -> Any:
    more = {"do_sample": False, "max_new_tokens": new, "pad_token_id": 0, **more}
    more = {"attention_mask": torch.ones_like(ids), **more}
    return model.generate(ids, past_key_values=cache, **more)


def greedy(model: PreTrainedModel, ids: Tensor, cache: Any, new: int = NEW) -> Tensor:
    step = ids
    with torch.inference_mode():
        for _ in range(new):
            step = model(step, past_key_values=cache).logits[:, -1:].argmax(-1)
            ids = torch.cat([ids, step], 1)
    return ids


@pytest.mark.parametrize("name", POLICIES)
def test_generate_is_the_greedy_loop_in_any_batch_and_shrinks_the_cache(
    name: str, model: PreTrainedModel
) -> None:
    policy = POLICIES[name]
    cache = PolicyCache(policy, model)
    both = generate(model, PROMPT, cache)
    seen = PROMPT.shape[1] + NEW - 1  # the last token is not fed back
    sizes = layout(policy, cache.shape)
    assert cache.get_seq_length() == seen
    assert cache.bytes_resident == sizes.bytes_at(seen, PROMPT.shape[1])
    if policy.evicts:
        full = layout(Policy(), cache.shape).bytes_at(seen)
        assert cache.bytes_resident <= policy.slots / seen * full + cache.shape.slot_bytes
    for row in range(2):
        alone = greedy(model, PROMPT[row : row + 1], PolicyCache(policy, model))
        assert torch.equal(both[row : row + 1], alone)


COPIED = {
    **POLICIES,
    "anchors": Policy(
        anchors=Anchors(at=5), tiers=(Tier(key_bits=8),), quantizer=Quantizer(group=8)
    ),
}


@pytest.fixture(scope="module")
def fp32() -> PreTrainedModel:
    """Whose decoded tokens go through the loops of a CPU, which read memory by its address."""
    return make(torch.float32)


def fed(model: PreTrainedModel, cache: PolicyCache, first: int, last: int) -> Tensor:
    """Logits of tokens `first` to `last` of the prompt, one by one."""
    parts = [model(PROMPT[:1, t : t + 1], past_key_values=cache).logits for t in range(first, last)]
    return torch.cat(parts, 1)


PICKLED = ("tiers", "ragged heads, bits per layer", "anchors")


@pytest.mark.parametrize(
    ("name", "how"),
    [*((name, copy.deepcopy) for name in COPIED),
     *((name, lambda x: pickle.loads(pickle.dumps(x))) for name in PICKLED)],
)  # fmt: skip
def test_a_copy_and_the_original_go_on_by_themselves(
    name: str,
    how: Callable[[PolicyCache], PolicyCache],
    model: PreTrainedModel,
    fp32: PreTrainedModel,
) -> None:
    for mine in (model, fp32):  # no op takes sums of attention of a float64 model
        cache, alone = (PolicyCache(COPIED[name], mine) for _ in range(2))
        with torch.inference_mode():
            for each in (cache, alone):
                mine(PROMPT[:1, :8], past_key_values=each)
                fed(mine, each, 8, 11)
            other = how(cache)
            want, got, own = (fed(mine, x, 11, 24) for x in (alone, other, cache))
        assert torch.equal(got, want) and torch.equal(own, want)
        assert other.bytes_resident == cache.bytes_resident == alone.bytes_resident


@pytest.mark.parametrize("name", FEW)
def test_calls_may_come_in_any_mode_of_torch(name: str, fp32: PreTrainedModel) -> None:
    """`generate` goes on where a loop in inference mode ended, and gradients may be tracked."""
    weight = fp32.get_input_embeddings().weight
    cache, plain = (PolicyCache(POLICIES[name], fp32) for _ in range(2))
    with torch.inference_mode():
        fp32(PROMPT[:1, :8], past_key_values=plain)
        want = fed(fp32, plain, 8, 24)
        fp32(PROMPT[:1, :8], past_key_values=cache)
        parts = [fed(fp32, cache, 8, 13)]
    weight.requires_grad_(True)
    parts.append(fed(fp32, cache, 13, 17).detach())
    with torch.inference_mode():
        parts.append(fed(fp32, cache, 17, 18))
    with torch.no_grad():
        parts.append(fed(fp32, cache, 18, 24))
    weight.requires_grad_(False)
    assert torch.equal(torch.cat(parts, 1), want)
    whole = torch.ones(1, 25, dtype=torch.long)
    text = generate(fp32, PROMPT[:1, :1], cache, 6, attention_mask=whole)
    assert torch.equal(text, greedy(fp32, PROMPT[:1, :1], plain, 6))


@pytest.mark.parametrize("name", FEW)
def test_autocast_changes_what_the_model_computes_and_not_the_cache(
    name: str, fp32: PreTrainedModel
) -> None:
    """What is held is as without it: 16-bit values are fp16, bits and sums as the policy says."""
    cache, plain = (PolicyCache(POLICIES[name], fp32) for _ in range(2))
    with torch.no_grad():
        want = fed(fp32, plain, 0, 24)
        with torch.autocast("cpu", torch.bfloat16):
            got = fed(fp32, cache, 0, 24)
    assert cache.bytes_resident == plain.bytes_resident
    for mine, theirs in zip(cache.groups, plain.groups, strict=True):
        dtypes = [{x.dtype for x in s.store.read()} for s in (mine, theirs)]
        assert dtypes[0] == dtypes[1]
    first = slice(0, 4)  # nothing is evicted yet, so that no rank decides
    assert (got[:, first] - want[:, first]).abs().max() < 0.1 * want.abs().max()


def test_beam_search_reorders_what_is_held(model: PreTrainedModel) -> None:
    beams = dict(num_beams=2, num_return_sequences=2, length_penalty=0.0)
    theirs = generate(model, PROMPT, DynamicCache(config=model.config), **beams)
    full = PolicyCache(Policy(), model, native=torch.float64)
    assert torch.equal(generate(model, PROMPT, full, **beams), theirs)
    for policy in POLICIES.values():
        found = generate(
            model, PROMPT, PolicyCache(policy, model), return_dict_in_generate=True,
            output_scores=True, **beams,
        )  # fmt: skip
        again, total = PolicyCache(policy, model), torch.zeros(4, dtype=torch.float64)
        ids = found.sequences
        with torch.inference_mode():  # the sequences that won, scored from an empty cache
            logits = model(ids[:, :24], past_key_values=again).logits
            for at in range(24, ids.shape[1]):
                gain = logits[:, -1].log_softmax(-1).gather(1, ids[:, at : at + 1])
                total += gain[:, 0]
                logits = model(ids[:, at : at + 1], past_key_values=again).logits
        assert (total - found.sequences_scores).abs().max() < 1e-4


OFFLOADED: dict[str, Callable[[PreTrainedModel, Any], object]] = {
    "cpu": lambda m, path: accelerate.cpu_offload(m, execution_device=torch.device("cpu")),
    "cpu, angles too": lambda m, path: accelerate.cpu_offload(
        m, execution_device=torch.device("cpu"), offload_buffers=True
    ),
    "disk": lambda m, path: accelerate.disk_offload(m, path, torch.device("cpu")),
    "last layer": lambda m, path: accelerate.dispatch_model(
        m,
        {
            "model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "cpu",
            "model.layers.2": "disk", "model.norm": "cpu", "model.rotary_emb": "cpu",
            "lm_head": "disk",
        },
        main_device="cpu", offload_dir=path,
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", OFFLOADED)
def test_offloaded_weights_are_asked_where_accelerate_computes(
    how: str, model: PreTrainedModel, tmp_path: Any
) -> None:
    away = make()
    OFFLOADED[how](away, str(tmp_path))
    for name in ("window re-indexed", "h2o"):
        want = generate(model, PROMPT, PolicyCache(POLICIES[name], model))
        assert torch.equal(generate(away, PROMPT, PolicyCache(POLICIES[name], away)), want)
    if how != "last layer":
        with pytest.raises(ModelError, match="needs weights in memory"):
            PolicyCache(Policy(slots=16, rule=Critical()), away)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_maps_are_refused_and_stay_those_of_other_caches(attention: str) -> None:
    model, ids = make(), PROMPT[:1]
    model.set_attn_implementation(attention)
    cache = PolicyCache(POLICIES["h2o"], model)
    part = "has no attention maps to return; call the model without output_attentions"
    with pytest.raises(ModelError, match=part), torch.no_grad():
        model(ids, output_attentions=True, past_key_values=cache)
    cache.reset()
    with pytest.raises(ModelError, match=part):
        generate(model, ids, cache, output_attentions=True, return_dict_in_generate=True)
    if attention == "eager":
        cache.reset()
        model.config.output_attentions = True
        with pytest.raises(ModelError, match=part), torch.no_grad():
            model(ids, past_key_values=cache)
        model.config.output_attentions = False
        with torch.no_grad():
            assert len(model(ids, output_attentions=True).attentions) == 3
    cache.reset()
    found = generate(model, ids, cache, output_hidden_states=True, return_dict_in_generate=True)
    assert found.hidden_states and torch.equal(
        found.sequences, generate(model, ids, PolicyCache(POLICIES["h2o"], model))
    )


def embedded(model: PreTrainedModel, x: Tensor, cache: Any, **more: Any) -> Tensor:
    """The new tokens; `x` are ids `[1, N]` or embeddings."""
    embeds = x if x.dim() == 3 else model.get_input_embeddings()(x)
    mask = torch.ones(embeds.shape[:2], dtype=torch.long)
    more = dict(do_sample=False, max_new_tokens=6, pad_token_id=0, attention_mask=mask) | more
    found: Tensor = model.generate(inputs_embeds=embeds, past_key_values=cache, **more)
    return found


@pytest.mark.parametrize("name", ["full", "window re-indexed", "h2o"])
def test_prompts_as_embeddings_are_compared_with_those_before(
    name: str, model: PreTrainedModel
) -> None:
    ids, cache = PROMPT[:1], PolicyCache(POLICIES[name], model)
    new = embedded(model, ids, cache)
    text = torch.cat([ids, new], 1)
    later = text.clone()
    later[0, 26] = 3 + later[0, 26] % 90  # another answer than the cache took in
    image = model.get_input_embeddings()(text).detach().clone()
    image[0, 7] += torch.linspace(-1, 1, image.shape[-1])
    others = [
        (PROMPT[1:], "token 0"), (PROMPT[1:].repeat(1, 2), "token 0"), (PROMPT[1:, :9], "token 0"),
        (torch.cat([later, ids], 1), "token 26"), (image, "token 7"),
    ]  # fmt: skip
    for other, part in others:
        with pytest.raises(ModelError, match=f"{part} of this prompt is another one"):
            embedded(model, other, cache)
    with pytest.raises(ModelError, match="token 0 of this prompt"):  # as ids
        generate(model, torch.cat([PROMPT[1:], text], 1), cache, 4)
    rounded = model.get_input_embeddings()(torch.cat([text, ids[:, :4]], 1))
    rounded = (rounded * (1 + 1e-3)).detach()  # as where an image is embedded again
    assert embedded(model, rounded, cache).shape == (1, 6)
    cache.reset()
    assert torch.equal(embedded(model, ids, cache), new)
    turn = torch.cat([text, ids[:, :4]], 1)  # and a turn that goes on, as ids
    assert generate(model, turn, cache, 4).shape == (1, 38)


@pytest.mark.parametrize("name", ["window re-indexed", "h2o"])
def test_any_attention_implementation_attends_through_the_cache(name: str) -> None:
    """FlexAttention's, which compiles masks, is a case of the padded batches above."""
    model = make()
    cache = PolicyCache(POLICIES[name], model)
    want = generate(model, PROMPT, cache)
    for other in ("eager", "sdpa"):
        model.set_attn_implementation(other)  # also after the cache was made
        cache.reset()
        assert torch.equal(generate(model, PROMPT, cache), want)
        padded = torch.ones_like(PROMPT)
        padded[0, 21:] = 0
        with pytest.raises(ModelError, match="equal length"):
            generate(model, PROMPT, PolicyCache(POLICIES[name], model), attention_mask=padded)


def test_a_cache_of_another_model_is_noticed() -> None:
    """Which would attend by other angles, or over heads of another shape; a copy is the same."""
    mine, same, other, wide = make(), make(), make(rope_theta=77.0), make(head_dim=32)
    cache = PolicyCache(POLICIES["window re-indexed"], mine)
    for model in (other, wide):
        with pytest.raises(ModelError, match="made for another model"):
            generate(model, PROMPT, cache)
        cache.reset()
    want = generate(mine, PROMPT, PolicyCache(POLICIES["window re-indexed"], mine))
    again = copy.deepcopy(cache)  # which has a config of its own
    for model, held in ((mine, cache), (same, cache), (mine, again), (copy.deepcopy(mine), cache)):
        held.reset()
        assert torch.equal(generate(model, PROMPT, held), want)


@pytest.mark.parametrize("policy", [POLICIES["window re-indexed"], Policy()])
def test_rolling_back_is_refused(policy: Policy, model: PreTrainedModel) -> None:
    """Also where nothing was evicted: the sentence claims nothing of that."""
    cache = PolicyCache(policy, model)
    assert not cache.is_croppable
    repeats = PROMPT[:1, :4].repeat(1, 5)  # drafts from the prompt will be wrong
    with pytest.raises(PolicyError, match="as assisted generation asks; generate without"):
        generate(model, repeats, cache, prompt_lookup_num_tokens=3)
    with pytest.raises(PolicyError, match="cannot be rolled back"):
        cache.crop(-1)


def test_rows_can_be_selected_and_repeated(model: PreTrainedModel) -> None:
    cache, swapped = (PolicyCache(POLICIES["tiers"], model) for _ in range(2))
    with torch.inference_mode():
        model(PROMPT, past_key_values=cache)
        model(PROMPT[:1], past_key_values=swapped)
        swapped.batch_repeat_interleave(3)
        swapped.batch_select_indices(torch.tensor([2, 0]))
        cache.reorder_cache(torch.tensor([0, 0]))
        step = PROMPT[:, :1]
        a = model(step, past_key_values=cache).logits
        b = model(step, past_key_values=swapped).logits
    assert (a - b).abs().max() < 1e-9 and cache.bytes_resident == swapped.bytes_resident


@pytest.mark.parametrize("name", FEW)
def test_another_number_of_sequences_is_one_sentence(name: str, fp32: PreTrainedModel) -> None:
    """As where a common prefix was read once, and several continuations are asked for."""
    cache, whole = (PolicyCache(POLICIES[name], fp32) for _ in range(2))
    with torch.no_grad():
        fp32(PROMPT[:1], past_key_values=cache)
        fp32(PROMPT[:1].repeat(3, 1), past_key_values=whole)
        for new in (1, 5):
            with pytest.raises(ModelError, match="3 sequences to a cache that holds 1; repeat"):
                fp32(PROMPT[:1, :new].repeat(3, 1), past_key_values=cache)
        cache.batch_repeat_interleave(3)
        step = PROMPT[0, :3, None]
        got, want = (fp32(step, past_key_values=x).logits for x in (cache, whole))
    assert (got - want).abs().max() < 1e-5 * want.abs().max()


def test_gradient_checkpointing_is_named_where_it_keeps_caches_out() -> None:
    model = make(torch.float32).train()
    model.gradient_checkpointing_enable()
    with pytest.raises(ModelError, match=r"does not use caches while it trains; call model\.eval"):
        PolicyCache(POLICIES["h2o"], model)
    assert fed(model, PolicyCache(POLICIES["h2o"], model.eval()), 0, 2).shape[1] == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sixteen_bits_are_those_of_the_model(dtype: torch.dtype) -> None:
    model = make(dtype)
    cache = PolicyCache(POLICIES["tiers"], model)
    generate(model, PROMPT, cache)
    store: Any = cache.groups[0].store
    held = {x.dtype for x in (store.keys[-1][0], store.values[-1][0])}  # sinks and residual tokens
    assert held == {torch.float16 if dtype == torch.float32 else dtype}
    sizes = layout(POLICIES["tiers"], cache.shape)
    assert cache.bytes_resident == sizes.bytes_at(PROMPT.shape[1] + NEW - 1)
