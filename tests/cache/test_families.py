"""Model families: served exactly, or refused in one sentence, and never silently wrong.

Everything runs in float64, where what differs is logic and not rounding (see test_cache.py). The
models are random and tiny; what counts is what each family does around attention.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from kvsearch.cache import PolicyCache
from kvsearch.errors import KvsearchError, ModelError
from kvsearch.evaluation.evaluator import Evaluator
from kvsearch.models.head import Head
from kvsearch.models.load import LoadedModel
from kvsearch.models.shape import policy_layers, shape_of
from kvsearch.policy import Budgets, Policy, Quantizer, Tier, layout
from kvsearch.rules import Attention
from tests.cache_cases import sharp
from tests.families import BASE, IDS, SERVED, WIDE, T, build, logits

UNTURNABLE = {"cohere", "gpt2"}  # interleaved channels; a table of positions
FP32_INSIDE = {"gemma2"}  # the family's own softmax of capped products is fp32 in any model


@pytest.fixture(params=SERVED, scope="module")
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_the_full_policy_is_the_unmodified_model(family: str) -> None:
    build.cache_clear()  # an installed model must not be the reference
    model = build(family)
    with torch.inference_mode():
        theirs = model(IDS).logits
    ours = logits(model, PolicyCache(Policy(), model, native=torch.float64), 9, 1, 14)
    tolerance = 1e-5 if family in FP32_INSIDE else 1e-12
    assert (ours - theirs).abs().max() < tolerance * theirs.abs().max()
    with torch.inference_mode():  # a cache of another kind still works
        assert (model(IDS).logits - theirs).abs().max() < tolerance * theirs.abs().max()
    if family not in UNTURNABLE:
        roomy = Policy(slots=T + 2, sinks=2, positions="cache")
        turned = logits(model, PolicyCache(roomy, model, native=torch.float64), 9, 1, 14)
        assert (turned - theirs).abs().max() < 1e-5 * theirs.abs().max()  # angles are fp32


POLICIES = [
    Policy(name="window re-indexed", slots=12, sinks=2, positions="cache"),
    Policy(name="window", slots=14, sinks=2, interval=3),
    Policy(
        name="h2o in 4 bits", slots=20, interval=4, sinks=2, recent_window=4, rule=Attention(),
        tiers=(Tier(key_bits=4, value_bits=4),),
        quantizer=Quantizer(group=8, rotate=True, levels="lloyd", fp16_sinks=True),
    ),
]  # fmt: skip


@pytest.fixture
def fp64_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager attention in transformers asks for an fp32 softmax in every model, even in fp64."""
    plain = torch.nn.functional.softmax

    def wide(x: Tensor, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
        return plain(x, *args, dtype=None if x.dtype == torch.float64 else dtype, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "softmax", wide)


# Token by token the quick suite asks those that differ in what attention hands to a cache, and in
# what lies beside it. The others do as one of these does; the other tests ask every family.
APART = {
    "llama", "llama MQA", "qwen2 half windowed", "gemma2", "gemma4", WIDE, "phi3", "granite",
    "smollm3", "gpt-neox", "lfm2", "cohere", "gpt2",
}  # fmt: skip


@pytest.mark.usefixtures("fp64_softmax")
@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=[pytest.mark.slow] * (f not in APART)) for f in SERVED],
    scope="module",
)
def test_one_call_is_the_deployed_cache_token_by_token(family: str) -> None:
    model = build(family)
    shape = shape_of(model.config)
    for policy in POLICIES:
        if policy.positions == "cache" and family in UNTURNABLE:
            continue
        sizes, deployed = layout(policy, shape), PolicyCache(policy, model)
        once = logits(model, PolicyCache(policy, model, packed=False))
        parts = []
        for t in range(T):
            parts.append(logits(model, deployed, ids=IDS[:, t : t + 1]))
            assert deployed.bytes_resident == sizes.bytes_at(t + 1), policy.name
        chunks = logits(model, PolicyCache(policy, model), 11, 1, 7)
        assert (torch.cat(parts, 1) - once).abs().max() < 1e-9, policy.name
        assert (chunks - once).abs().max() < 1e-9, policy.name


ONE_LAYER = [*SERVED, "phi3 partial"]
for name in [
    *UNTURNABLE,
    "lfm2",
    "smollm3",
    "qwen2 half windowed",
    WIDE,
]:  # nothing to turn, or no layer
    ONE_LAYER.remove(name)


@pytest.mark.parametrize("family", ONE_LAYER)
def test_reindexed_slots_are_the_model_run_on_what_is_held(family: str) -> None:
    """With one layer a key depends on its token alone, so dropping slots is dropping tokens."""
    model = build(family, one_layer=True)
    cache = PolicyCache(Policy(slots=10, sinks=2, positions="cache"), model, native=torch.float64)
    ours = logits(model, cache, 20, 1)
    for t in (12, 19, 20, T - 1):
        held = [0, 1, *range(t - 7, t + 1)]
        with torch.inference_mode():
            theirs = model(IDS[:, held]).logits[:, -1]
        assert (ours[:, t] - theirs).abs().max() < 1e-5 * theirs.abs().max()


@pytest.mark.parametrize("family", ["gemma3", "gpt-neox", "lfm2", "gpt2"])
def test_tokens_of_a_call_before_are_refused_by_name(family: str) -> None:
    """By what `generate` is given, whether or not the family hands positions to attention."""
    model, policy = build(family), Policy(slots=24, sinks=2, interval=3)
    more: Any = dict(max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None)
    want = model.generate(IDS, past_key_values=PolicyCache(policy, model), **more)
    cache = PolicyCache(policy, model)
    with pytest.raises(ModelError, match="use_cache is False"):
        model.generate(IDS, past_key_values=cache, use_cache=False, **more)
    cache.reset()
    logits(model, cache)
    with pytest.raises(ModelError, match="taken in already"):
        model.generate(IDS, past_key_values=cache, **more)
    cache.reset()
    assert torch.equal(model.generate(IDS, past_key_values=cache, **more), want)
    for other in (IDS.flip(1), IDS[:, :9], want.flip(1), torch.cat([want, IDS], 1).flip(1)):
        with pytest.raises(ModelError, match=r"reset\(\)"):
            model.generate(other, past_key_values=cache, **more)
    turn = torch.cat([want, IDS[:, :5]], 1)
    assert model.generate(turn, past_key_values=cache, **more).shape[1] == turn.shape[1] + 4


def test_layers_that_do_not_turn_their_keys_are_left_as_they_are() -> None:
    model = build("smollm3")
    for layer in model.model.layers[:3]:  # only the last layer, without RoPE, mixes tokens
        layer.self_attn.o_proj.weight.zero_()
    build.cache_clear()
    cache = PolicyCache(Policy(slots=10, sinks=2, positions="cache"), model, native=torch.float64)
    turned = [group.rotary.inv_freq.any().item() for group in cache.groups if group.rotary]
    assert turned == [True, True, True, False]
    ours = logits(model, cache)
    with torch.inference_mode():
        theirs = model(IDS[:, [0, 1, *range(T - 8, T)]]).logits[:, -1]
    assert (ours[:, -1] - theirs).abs().max() < 1e-5 * theirs.abs().max()


@pytest.mark.parametrize("family", ["qwen3-next", "falcon-h1", "zamba2"])
def test_linear_attention_keeps_its_own_cache_beside_or_between_policy_layers(family: str) -> None:
    model = build(family)
    with torch.inference_mode():
        theirs = model(IDS).logits
    cache = PolicyCache(Policy(), model, native=torch.float64)
    assert len(cache.groups) == 2 and len(cache.layers) == model.config.num_hidden_layers
    ours = logits(model, cache, 9, 1, 14)
    assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()  # its delta rule is fp32
    more: Any = dict(max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None)
    want = model.generate(IDS, **more)
    cache = PolicyCache(Policy(), model, native=torch.float64)
    for _ in range(2):  # a state that was not forgotten would be noticed
        cache.reset()
        assert torch.equal(model.generate(IDS, past_key_values=cache, **more), want)
    window = Policy(slots=12, sinks=2, interval=3)
    deployed = PolicyCache(window, model)
    cut = logits(model, deployed, 9, 1, 14)
    once = logits(model, PolicyCache(window, model, packed=False))
    assert (cut - once).abs().max() < 1e-4 * theirs.abs().max()
    assert deployed.bytes_resident == layout(window, deployed.shape).bytes_at(T)


@pytest.mark.parametrize("family", ["jamba", "bamba", "llama4"])
def test_what_follows_a_prompt_is_evaluated_as_it_is_decoded(family: str) -> None:
    """Jamba begins its state anew in calls of several tokens, Bamba its positions in all.

    The body of Llama 4 has another name than its class says.
    """
    model, policy = build(family), Policy(slots=14, sinks=2, trigger="prompt")
    loaded = LoadedModel(model, None, shape_of(model.config), "", "", "", None, "float64", "cpu")
    mine = Evaluator(loaded).quality(policy, IDS.numpy(), prompt=20, resident=False).nll
    cache, parts = PolicyCache(policy, model), []
    with torch.inference_mode():
        for at in torch.arange(T)[None].split([20] + [1] * (T - 20), 1):
            parts.append(model(IDS[:, at[0]], position_ids=at, past_key_values=cache).logits)
    theirs = torch.cat(parts, 1).log_softmax(-1)[:, :-1].gather(-1, IDS[:, 1:, None])[..., 0]
    np.testing.assert_allclose(mine, -theirs, atol=2e-5)  # the state is fp32
    if family == "bamba":
        with pytest.raises(ModelError, match="the next tokens, give position_ids from 20 on"):
            logits(model, PolicyCache(policy, model), 20)


REFUSED = [  # family, positions, a part of the sentence
    ("mistral windowed", "original", "every layer of this 'mistral' model has a sliding window"),
    ("gpt-j", "original", "does not attend through transformers' attention interface"),
    ("falcon alibi", "original", "does not attend through transformers' attention interface"),
    ("gpt-oss", "original", "learned attention sinks"),
    ("deepseek-v3", "original", "layer 0 of DeepseekV3ForCausalLM does not hand 4 keys"),
    ("gemma3n", "original", "share caches"),
    (
        "gemma4 without windows",
        "original",
        "layer 0 has 4 query and 2 KV heads of 8 channels, layer 1",
    ),
    ("llama rope dynamic", "cache", "rope type 'dynamic'"),
    ("phi3 longrope", "cache", "rope type 'longrope'"),
    ("ministral3", "cache", "layer 0 of this 'ministral3' model does something else"),
    ("cohere", "cache", "layer 0 of this 'cohere' model does something else"),
    ("cohere2", "cache", "no layer of this 'cohere2' model turns its keys"),
    ("gpt2", "cache", "layer 0 of this 'gpt2' model does something else"),
]


@pytest.mark.parametrize(("family", "positions", "part"), REFUSED)
def test_what_cannot_be_served_is_refused_in_one_sentence(
    family: str, positions: Any, part: str
) -> None:
    model = build(family)
    with pytest.raises(KvsearchError) as caught:
        PolicyCache(Policy(slots=12, sinks=2, positions=positions), model)
    sentence = str(caught.value)
    assert isinstance(caught.value, ModelError) and part in sentence
    assert "\n" not in sentence and ". " not in sentence
    if positions == "cache":  # and the advice in the sentence works
        PolicyCache(Policy(slots=12, sinks=2), model)


LONG_ROPES = ["llama longrope", "phi3 longrope", "phimoe"]


@pytest.mark.usefixtures("fp64_softmax")
@pytest.mark.parametrize("family", LONG_ROPES)
def test_longer_texts_turn_all_keys_alike_or_are_refused(family: str) -> None:
    """Angles change after 32 tokens: a cache holds keys of one side only, as one pass has them."""
    model = build(family)
    loaded = LoadedModel(model, None, shape_of(model.config), "", "", "", None, "float64", "cpu")
    for policy in POLICIES[1:]:
        once = logits(model, PolicyCache(policy, model, packed=False))
        for cuts in ([33, 1, 1], [35]):
            cut = logits(model, PolicyCache(policy, model), *cuts)
            assert (cut - once).abs().max() < 1e-9, policy.name
        under = IDS[:, :32]
        cut = logits(model, PolicyCache(policy, model), 20, *[1] * 11, ids=under)
        short = logits(model, PolicyCache(policy, model, packed=False), ids=under)
        assert (cut - short).abs().max() < 1e-9, policy.name
        for cuts in ([32], [1] * 35, [20]):
            with pytest.raises(ModelError, match="other angles from token 33 on") as caught:
                logits(model, PolicyCache(policy, model), *cuts)
        assert "\n" not in str(caught.value) and ". " not in str(caught.value)
    with pytest.raises(ModelError, match="other angles from token 33 on"):
        Evaluator(loaded).quality(POLICIES[1], IDS.numpy(), prompt=20)
    Evaluator(loaded).quality(POLICIES[1], IDS.numpy(), prompt=33)


@pytest.mark.parametrize("family", ["llama rope dynamic", "gemma3 rope dynamic"])
def test_angles_that_change_with_every_token_are_refused(family: str) -> None:
    model, policy = build(family), POLICIES[1]
    loaded = LoadedModel(model, None, shape_of(model.config), "", "", "", None, "float64", "cpu")
    for work in (
        lambda: Evaluator(loaded).quality(policy, IDS.numpy()),
        lambda: logits(model, PolicyCache(policy, model)),
        lambda: logits(model, PolicyCache(policy, model), *[1] * 35),
    ):
        with pytest.raises(ModelError, match="stay within 31 tokens"):
            work()
    under = IDS[:, :31]
    cut = logits(model, PolicyCache(policy, model), *[1] * 30, ids=under)
    with torch.inference_mode():
        model(IDS)  # after a longer call angles are reset by fewer than 32 tokens only
    once = logits(model, PolicyCache(policy, model, packed=False), ids=under)
    assert (cut - once).abs().max() < 1e-9


@pytest.mark.parametrize("family", ["llama longrope", "llama rope dynamic"])
@pytest.mark.parametrize(("tokens", "start", "stride"), [(20, 13, 1), (16, 0, 3), (20, 12, 1)])
def test_angles_go_by_positions(family: str, tokens: int, start: int, stride: int) -> None:
    model = build(family)
    at = torch.arange(tokens)[None] * stride + start
    for policy in (Policy(), POLICIES[1]):
        cache = PolicyCache(policy, model, native=torch.float64)
        if start == 12 and family == "llama longrope":  # all within: nothing is refused
            with torch.inference_mode():
                found = model(IDS[:, :20], position_ids=at, past_key_values=cache).logits
                want = model(IDS[:, :20], position_ids=at).logits
            assert policy.evicts or (found - want).abs().max() < 1e-12
            continue
        with pytest.raises(ModelError, match="give position_ids that count the tokens") as caught:
            model(IDS[:, :tokens], position_ids=at, past_key_values=cache)
        assert "\n" not in str(caught.value) and ". " not in str(caught.value)


class BeginsAnew(transformers.LlamaForCausalLM):  # type: ignore[misc]
    """As models do by code of their own, whatever their angles."""

    def prepare_inputs_for_generation(
        self, input_ids: Any, past_key_values: Any = None, **kwargs: Any
    ) -> Any:
        if input_ids.shape[1] > 32 and past_key_values.get_seq_length() <= 32:
            past_key_values, kwargs["next_sequence_length"] = None, None
        return super().prepare_inputs_for_generation(
            input_ids, past_key_values=past_key_values, **kwargs
        )


@pytest.mark.parametrize("family", ["phi3 longrope", "phimoe", "begins anew"])
def test_a_model_that_puts_the_cache_aside_is_noticed(family: str) -> None:
    if family == "begins anew":
        torch.manual_seed(0)
        model: Any = sharp(BeginsAnew(transformers.LlamaConfig(**BASE)).double())
    else:
        model = build(family)
    more: Any = dict(max_new_tokens=5, do_sample=False, pad_token_id=0, eos_token_id=None)
    for policy in (Policy(), POLICIES[1]):
        cache = PolicyCache(policy, model)
        found = model.generate(IDS, past_key_values=cache, return_dict_in_generate=True, **more)
        assert found.past_key_values is cache and cache.get_seq_length() == T + 4
        assert cache.bytes_resident == layout(policy, cache.shape).bytes_at(T + 4)
        ids, alone = IDS, PolicyCache(policy, model)
        with torch.inference_mode():
            new = IDS
            for _ in range(5):
                new = model(new, past_key_values=alone).logits[:, -1:].argmax(-1)
                ids = torch.cat([ids, new], 1)
        assert torch.equal(found.sequences, ids)
        with pytest.raises(ModelError, match=r"reset\(\)"):  # of another sequence
            model.generate(IDS.flip(1), past_key_values=cache, **more)
        for first in (30, 32):
            cache.reset()
            with pytest.raises(ModelError, match="begins anew without the cache, which has seen"):
                model.generate(IDS[:, :first], past_key_values=cache, **more)
        cache.reset()  # as the sentence says
        again = model.generate(IDS, past_key_values=cache, **more)
        assert torch.equal(again, found.sequences)


def test_a_model_whose_code_turns_by_other_angles_is_refused() -> None:
    """Rotations are compared with those of the buffers `inv_freq`, whatever the model's name."""
    model = build("llama")
    build.cache_clear()
    rope = model.model.rotary_emb
    rope.forward = lambda x, position_ids, f=rope.forward: f(x, position_ids * 2)
    with pytest.raises(ModelError, match="does something else"):
        PolicyCache(Policy(slots=12, positions="cache"), model)


def test_a_pass_may_start_at_the_first_layer_that_differs(family) -> None:
    """What layers before it gave is repeated: a family must not hand anything around them."""
    model = build(family)
    layers = policy_layers(model.config)
    loaded = LoadedModel(model, None, shape_of(model.config), "", "", "", None, "float64", "cpu")
    divergence = Evaluator(loaded).divergence(IDS.numpy())
    weights = (float(T + 16),) * (len(layers) - 1) + (32.0,)
    budgets = Budgets(kind="sensitivity", exponent=1.0, weights=weights)
    starved = Policy(slots=round(sum(weights) / len(layers)), interval=16, budgets=budgets)
    short, whole = divergence.of(starved, same=layers[-1]), divergence.of(starved)
    assert short.max() > 1e-5
    np.testing.assert_allclose(short, whole, atol=1e-6)  # logits are fp32
    assert divergence.spent < 3 * IDS.numel()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("prefix", "more"), [("Gemma2", {}), ("Granite", dict(logits_scaling=6.0)), ("Llama", {})]
)
def test_a_head_is_known_in_every_type_and_another_one_is_refused(
    prefix: str, more: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Families cap and scale logits in the type of the weights, which rounds large ones off."""
    torch.manual_seed(0)
    config = getattr(transformers, prefix + "Config")(**BASE, **more)
    model = getattr(transformers, prefix + "ForCausalLM")(config).eval().requires_grad_(False)
    model.get_output_embeddings().weight.mul_(200 if prefix == "Granite" else 10)
    model = model.to(dtype)
    Head(model)
    plain = model.forward
    changes: list[Callable[[Tensor], Tensor]] = [
        lambda x: x * 1.1,
        lambda x: x + x.abs().max() / 10,
        lambda x: 2 * torch.tanh(x / 2),
        lambda x: x.roll(1, -1),
    ]
    for change in changes:

        def other(*args: Any, change: Any = change, **kwargs: Any) -> Any:
            out = plain(*args, **kwargs)
            out.logits = change(out.logits)
            return out

        monkeypatch.setattr(model, "forward", other)
        with pytest.raises(ModelError, match="in a way kvsearch does not know"):
            Head(model)
