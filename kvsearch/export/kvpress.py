"""kvpress: presses that prune after a prompt and while decoding, in 16 bits."""

from kvsearch.export.capability import ONE, Capability, Eviction, Ranking, Sizes
from kvsearch.export.target import Artefact, Job, Target
from kvsearch.rules import Attention, KeyDiff, KeyNorm, Rule
from kvsearch.rules.lagkv import LagKV

VERSION = "0.5.5"
NONE = Sizes(only=(0,))
SKIP = 4  # sinks that a press sees to by itself

WINDOW = 32  # queries that SnapKV looks at
SNAPKV = Attention(horizon=WINDOW, pool=5)
TOVA = Attention(horizon=1, share="layer")

_SCRIPT = '''"""Generate with kvpress and this KV-cache policy.

    python run.py MODEL "once upon a time"

Needs: pip install kvpress=={version}
"""

import sys

import torch
from kvpress import {presses}
from transformers import AutoModelForCausalLM, AutoTokenizer

TARGET = {target}  # tokens that a compaction leaves; None prunes nothing
INTERVAL = {interval}  # tokens between compactions while decoding; None prunes the prompt only


def base(ratio):
    return {press}


tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], attn_implementation="sdpa")
ids = tokenizer(sys.argv[2], return_tensors="pt")
length = ids["input_ids"].shape[1]
if TARGET is None:
    out = model.generate(**ids, max_new_tokens=64, do_sample=False)
else:
    press = base(max(0.0, 1 - (TARGET + 0.5) / length))
    if INTERVAL is not None:
        decoding = DecodingPress(
            base_press=base(0.0), compression_interval=INTERVAL, target_size=TARGET
        )
        press = PrefillDecodingPress(prefilling_press=press, decoding_press=decoding)
    with torch.no_grad(), press(model):
        out = model.generate(**ids, max_new_tokens=64, do_sample=False)
print(tokenizer.decode(out[0], skip_special_tokens=True))
'''


def _press(rule: Rule | None, sinks: int) -> tuple[str, dict[str, object]]:
    """Class of a press and its arguments, the ratio aside."""
    if rule is None:
        return "StreamingLLMPress", {"n_sink": sinks}
    if rule.name == "key-norm":
        return "KnormPress", {}
    if rule.name == "keydiff":
        return "KeyDiffPress", {}
    if rule.name == "lagkv":
        lag = rule.model_dump()["lag"]
        return "LagKVPress", {"n_sink": SKIP, "lag_size": lag}
    assert isinstance(rule, Attention)
    if rule.horizon == 1:
        return "TOVAPress", {}
    return "SnapKVPress", {"window_size": rule.horizon, "kernel_size": rule.pool}


def write(job: Job) -> Artefact:
    """`run.py`."""
    p = job.policy
    name, arguments = _press(p.rule if p.evicts else None, p.sinks)
    target = None if p.slots is None else p.slots - p.interval
    interval = p.interval if p.trigger == "prompt+stream" else None
    given = "".join(f", {k}={v}" for k, v in arguments.items())
    text = _SCRIPT.format(
        version=VERSION,
        presses=", ".join(sorted({"DecodingPress", "PrefillDecodingPress", name})),
        target=target,
        interval=interval,
        press=f"{name}(compression_ratio=ratio{given})",
    )
    options: dict[str, object] = {}
    if target is not None:
        options = {**arguments, "press": name}
        if interval is not None:
            options |= {"compression_interval": interval, "target_size": target}
    return Artefact({"run.py": text}, options)


TARGET = Target(
    name="kvpress",
    runtime="kvpress",
    version=VERSION,
    knobs="sinks and a window, key-norm, keydiff, lagkv, snapkv or tova, after a prompt and every "
    "so many tokens",
    executes=Capability(
        eviction=Eviction(
            rankings=(
                Ranking(None, Sizes(), Sizes()),
                Ranking(KeyNorm()),
                Ranking(KeyDiff()),
                Ranking(LagKV(), sinks=Sizes(only=(SKIP,))),
                Ranking(
                    SNAPKV, recent_window=Sizes(only=(WINDOW,)), interval=Sizes(low=WINDOW)
                ),
                Ranking(TOVA, recent_window=ONE),
            ),
            triggers=("prompt+stream", "prompt"),
            sinks=NONE,
            recent_window=NONE,
        ),
    ),
    options={
        "press": (
            "StreamingLLMPress", "KnormPress", "KeyDiffPress", "LagKVPress", "SnapKVPress",
            "TOVAPress", "DecodingPress", "PrefillDecodingPress",
        ),
        "n_sink": int,
        "lag_size": int,
        "window_size": int,
        "kernel_size": int,
        "compression_interval": int,
        "target_size": int,
    },
    write=write,
    notes=(
        "kvpress needs transformers below 5.3, so an environment of its own.",
        "Its presses score anew at each compaction, from the hidden states of up to 256 tokens.",
    ),
    distribution="kvpress",
)  # fmt: skip
