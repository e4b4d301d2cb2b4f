"""Padding, masks and positions that a caller gives: served as rows alone are, or refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kvsearch.cache import PolicyCache
from kvsearch.errors import ModelError
from kvsearch.policy import Budgets, Policy
from kvsearch.rules import Attention
from tests.generation import NEW, POLICIES, PROMPT, make


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make()


@pytest.mark.parametrize(
    "attention", ["sdpa", "eager", pytest.param("flex_attention", marks=pytest.mark.slow)]
)
def test_rows_of_a_batch_that_is_padded_on_the_left_are_what_they_are_alone(attention: str) -> None:
    model, pads = make(), (5, 0)
    model.set_attn_implementation(attention)
    mask = torch.ones_like(PROMPT)
    mask[0, :5] = 0
    new = 2 if attention == "flex_attention" else NEW  # whose masks are compiled for each call
    more: Any = dict(max_new_tokens=new, do_sample=False, pad_token_id=0, output_logits=True,
                     return_dict_in_generate=True)  # fmt: skip
    names = [*POLICIES, "adakv", "the prompt stays"] if attention == "sdpa" else ["h2o"]
    some = {
        **POLICIES,
        "the prompt stays": Policy(slots=12, interval=4, trigger="generation"),
        "adakv": Policy(slots=24, interval=4, rule=Attention(), budgets=Budgets(kind="adakv")),
    }
    for name in names:
        cache, sizes = PolicyCache(some[name], model), []
        with torch.inference_mode():
            both = model.generate(PROMPT * mask, attention_mask=mask, past_key_values=cache, **more)
            for i, pad in enumerate(pads):
                alone = PolicyCache(some[name], model)
                one = model.generate(PROMPT[i : i + 1, pad:], past_key_values=alone, **more)
                for a, b in zip(one.logits, both.logits, strict=False):
                    assert (a[0] - b[i]).abs().max() < 1e-5, name
                sizes.append(alone.bytes_resident)
            assert cache.bytes_resident == max(sizes)
            if name == "adakv" or new < NEW:  # alone it serves no beams
                continue
            cache.reset()  # the next batch may be another one, and be searched in beams
            beams = dict(num_beams=2, max_new_tokens=6, do_sample=False, pad_token_id=0)
            found = model.generate(
                PROMPT * mask, attention_mask=mask, past_key_values=cache, **beams
            )
            alone = PolicyCache(some[name], model)
            want = model.generate(PROMPT[:1, 5:], past_key_values=alone, **beams)
            assert found[0, 24:].tolist()[:4] == want[0, 19:].tolist()[:4], name


def test_padding_is_refused_in_one_sentence(model: PreTrainedModel) -> None:
    """Behind a prompt; in front of one without positions; another one later."""
    behind, front = torch.ones_like(PROMPT), torch.ones_like(PROMPT)
    behind[0, 21:] = front[0, :3] = 0
    cache = PolicyCache(POLICIES["h2o"], model)
    with pytest.raises(ModelError, match="equal length") as caught, torch.inference_mode():
        model.generate(PROMPT, attention_mask=behind, past_key_values=cache, max_new_tokens=2)
    assert "\n" not in str(caught.value) and ". " not in str(caught.value)
    assert cache.bytes_resident == 0
    cache = PolicyCache(POLICIES["window re-indexed"], model)
    with pytest.raises(ModelError, match="count each row's own"), torch.inference_mode():
        model(
            PROMPT, attention_mask=front, past_key_values=cache, position_ids=torch.arange(24)[None]
        )
    cache = PolicyCache(POLICIES["h2o"], model)
    with torch.inference_mode():
        model(PROMPT, attention_mask=front, past_key_values=cache)
        with pytest.raises(ModelError, match="hides other tokens than the padding"):
            grown = torch.cat([behind, torch.ones(2, 1)], 1).long()
            grown[0, :5] = 0
            model(PROMPT[:, :1], attention_mask=grown, past_key_values=cache)


def test_masks_and_positions_of_the_callers_own_are_refused(model: PreTrainedModel) -> None:
    look_ahead = torch.ones(1, 1, 24, 24, dtype=torch.bool)  # a prefix that sees all of itself
    ids, policy = PROMPT[:1], POLICIES["window re-indexed"]
    with torch.inference_mode():
        with pytest.raises(ModelError, match="shows later ones"):
            model(ids, attention_mask=look_ahead, past_key_values=PolicyCache(policy, model))
        with pytest.raises(ModelError, match="expected position 0"):
            shifted = torch.arange(5, 29)[None]
            model(ids, position_ids=shifted, past_key_values=PolicyCache(policy, model))
        causal = PolicyCache(policy, model)
        by_hand = model(ids, attention_mask=look_ahead.tril(), past_key_values=causal).logits
        plain = model(ids, past_key_values=PolicyCache(policy, model)).logits
        assert torch.equal(by_hand, plain)


def test_a_mask_or_positions_that_are_edited_in_place_are_looked_at_again(
    model: PreTrainedModel,
) -> None:
    ids, policy = PROMPT[:1], POLICIES["window re-indexed"]
    square = torch.ones(1, 1, 24, 24, dtype=torch.bool).tril()
    flat, places = torch.ones(2, 24, dtype=torch.long), torch.arange(24)[None]

    def hide() -> None:
        square[..., 3] = False
        square[..., 3, 3] = True

    def pad(rows: int = 1) -> None:
        flat[:rows, :5] = 0

    calls: list[tuple[dict[str, Any], Callable[[], Any], str]] = [
        (dict(attention_mask=square), hide, "hides some"),
        (dict(position_ids=places), lambda: places.add_(5), "expected position 0"),
    ]
    for mode in (torch.no_grad, torch.inference_mode):
        for given, edit, part in calls:
            for x in given.values():
                x.copy_(torch.ones_like(square).tril() if x is square else torch.arange(24)[None])
            with mode():
                model(ids, **given, past_key_values=PolicyCache(policy, model))
                edit()
                with pytest.raises(ModelError, match=part):
                    model(ids, **given, past_key_values=PolicyCache(policy, model))
    with torch.no_grad():  # padding that was not there at first, or is there no more
        for _ in range(2):
            model(PROMPT, attention_mask=flat, past_key_values=PolicyCache(POLICIES["h2o"], model))
            pad()
        own = (flat.cumsum(-1) - 1).clamp(min=0)
        cache = PolicyCache(POLICIES["h2o"], model)
        padded = model(PROMPT, attention_mask=flat, position_ids=own, past_key_values=cache).logits
        alone = PolicyCache(POLICIES["h2o"], model)
        want = model(PROMPT[:1, 5:], past_key_values=alone).logits
        assert (padded[:1, 5:] - want).abs().max() < 1e-5
        flat.fill_(1)
        cache = PolicyCache(POLICIES["h2o"], model)
        plain = model(PROMPT, attention_mask=flat, past_key_values=cache).logits
        want = model(PROMPT, past_key_values=PolicyCache(POLICIES["h2o"], model)).logits
        assert torch.equal(plain, want)
