"""The files of a conformance kit; `docs/vectors.md` explains them."""

import json
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from kvsearch.errors import PolicyError
from kvsearch.policy import ModelShape, Policy, check, layout
from kvsearch.vectors.model import VOCABULARY, ids_of, shape_for, tiny
from kvsearch.vectors.record import NotedStore, Record, record

SCHEMA = "kvsearch.vectors/1"
LAST = 8  # compactions whose whole state is in the kit
SEEDS = 20
MOST = 50_000  # tokens times parts; with a rule no stream beyond was found with clear decisions

LONGEST = 1 << 16  # tokens, of any kit


def kit(policy: Policy, prompt: int = 0) -> dict[str, bytes]:
    """Everything that a runtime needs to test itself under `policy`, by file name.

    Args:
        policy: to be implemented.
        prompt: tokens that arrive in one call; 0 is one token, or where a prompt triggers
            compactions more than the policy's slots.

    Raises:
        PolicyError: the policy needs a text or a certain model, or is too large.
    """
    learned = policy.rule is not None and "hidden" in policy.rule.needs
    for name, there in (
        ("anchors", policy.anchors),
        ("channels", policy.channels.active),
        ("weights of the rule", learned),
        ("offsets of keys", policy.offset is not None),
        ("fitted values", policy.refits),
    ):
        if there:
            raise PolicyError(
                f"{name} belong to a certain text or model, which a kit of vectors has none of; "
                "leave them out of the policy"
            )
    if policy.trigger == "generation":
        raise PolicyError(
            "field trigger: 'generation' keeps the prompt, whose length a kit does not tell apart; "
            "give a copy of the policy with trigger 'prompt+stream'"
        )
    shape = shape_for(policy)
    parts = layout(policy, shape).layers
    largest = max((part.slots or 0 for part in parts), default=0)
    if prompt < 0:
        raise PolicyError(f"--prompt must be at least 0, got {prompt}")
    if prompt == 0:
        prompt = largest + policy.interval if policy.after_prompt else 1
    check(policy, shape, prompt=prompt)
    tokens = max(48, largest + 4 * policy.interval, prompt + 4 * policy.interval)
    if tokens > LONGEST:
        raise PolicyError(
            f"a kit of {tokens:,} tokens is too large, {LONGEST:,} are the most; give fewer slots, "
            "a shorter interval or a shorter prompt in a copy of the policy"
        )
    if policy.scored and tokens * len(parts) > MOST:
        raise PolicyError(
            f"a kit of {tokens:,} tokens and {shape.layers} layers with {len(parts)} kinds of "
            "heads is too large: some eviction would hang on rounding; leave fewer layers in a "
            "copy of the policy, such as the first two rows of budgets.weights or head_tiers.of"
        )
    ids, done = _stream(policy, shape, tokens, prompt)
    arrays, manifest = _written(policy, shape, ids, prompt, done)
    model = tiny(shape)
    weights = {k: v.contiguous() for k, v in model.state_dict().items()}
    return {
        "policy.json": policy.to_json().encode(),
        "vectors.json": (json.dumps(manifest, indent=1) + "\n").encode(),
        "arrays.safetensors": safetensors.torch.save(arrays),
        "model/config.json": model.config.to_json_string(use_diff=False).encode(),
        "model/model.safetensors": safetensors.torch.save(weights, {"format": "pt"}),
    }


def _stream(policy: Policy, shape: ModelShape, tokens: int, prompt: int) -> tuple[Tensor, Record]:
    """Ids for which no decision hangs on rounding: in fp32 and in fp64 the same tokens leave."""
    for seed in range(SEEDS):
        ids = torch.from_numpy(ids_of(tokens, seed))
        done = record(policy, (tiny(shape), tiny(shape).double()), ids, prompt)
        if done is not None:
            return ids, done
    raise PolicyError(
        f"in {SEEDS} streams of {tokens} tokens some eviction hung on rounding; give a policy with "
        "fewer compactions or a longer interval, or for fewer layers"
    )


def _written(
    policy: Policy, shape: ModelShape, ids: Tensor, prompt: int, done: Record
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Arrays by name, and the description of them."""
    arrays = {"ids": ids, "logits": done.logits}
    for i, layer in enumerate(done.layers):
        arrays[f"layer.{i}.query"] = torch.cat(layer.queries, 1).transpose(0, 1)
        arrays[f"layer.{i}.output"] = torch.cat(layer.outputs, 1).transpose(0, 1)
    parts = []
    for i, (group, store) in enumerate(zip(done.groups, done.stores, strict=True)):
        part = group.layout
        for name, which in (("key", 0), ("value", 1)):
            found = torch.cat([pair[which] for pair in store.arrived], 1)
            arrays[f"part.{i}.{name}"] = found.transpose(0, 1)
        last = store.log[-LAST:]
        for c in last:
            arrays |= _state(f"part.{i}.after.{c.seen}", store, c.seen)
        parts.append(
            {
                "layer": part.layer,
                "heads": [*part.heads],
                "slots": part.slots,
                "tiers": [[t.key_bits, t.value_bits] for t in part.policy.tiers],
                "compactions": [{"seen": c.seen, "gone": c.gone} for c in store.log],
                "states": [c.seen for c in last],
            }
        )
    manifest = {
        "schema": SCHEMA,
        "policy": policy.plain(),
        "model": {**shape.plain(), "vocabulary": VOCABULARY},
        "tokens": len(ids),
        "prompt": prompt,
        "parts": parts,
    }
    return {k: v.contiguous().clone() for k, v in arrays.items()}, manifest


def _state(prefix: str, store: NotedStore, seen: int) -> dict[str, Tensor]:
    """Tokens, pools and packed bytes after the compaction at `seen`."""
    (c,) = (c for c in store.log if c.seen == seen)
    out = {f"{prefix}.kept": c.kept.to(torch.int32), f"{prefix}.pool": c.pools.to(torch.uint8)}
    native = len(c.keys) - 1
    for side, pools in (("key", c.keys), ("value", c.values)):
        for i, held in enumerate(pools):
            if held is None:
                continue
            tier = "native" if i == native else str(i)
            for name, x in zip(("codes", "scales"), held, strict=False):
                out[f"{prefix}.{tier}.{side}.{name}"] = x[0]
    return out
