"""OpenVINO GenAI on a CPU: eviction by summed attention in whole blocks, 8 and 4 bits."""

from itertools import product

from kvsearch.exporters.capability import Capability, Eviction, Format, Ranking, Sizes
from kvsearch.exporters.target import Artefact, Environment, Job, Target
from kvsearch.rules import Attention

VERSION = "2026.4.1.0"
BLOCK = 32  # tokens, on a CPU
BITS = {8: "u8", 4: "u4"}
FORMATS = tuple(
    Format(f"{BITS[k]},{BITS[v]}", k, v, "uniform", group=group, divides=group or 1)
    for group, k, v in product((None, 64, 32), BITS, BITS)
)
SUM = Attention(share="layer")
NORM_SUM = Attention(beta=1, share="layer")

_SCRIPT = '''"""Generate with OpenVINO GenAI and this KV-cache policy, or score token ids with it.

    python run.py MODEL "once upon a time"
    python run.py MODEL.gguf --score ids.json --out nll.json

MODEL is a folder with an OpenVINO model, or a .gguf file.
Needs: pip install openvino-genai=={version}
"""

import argparse
import json

import numpy as np
import openvino
import openvino_genai as ov

PROPERTIES = {properties}
EVICTION = {eviction}
# for comparisons: activations are not rounded, so that only the cache differs
PLAIN = {{"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}}
NEW = 96  # tokens generated where no losses can be had


def scheduler():
    made = ov.SchedulerConfig()
    made.enable_prefix_caching = False
    if EVICTION is not None:
        start, recent, most, mode, rotate = EVICTION
        made.use_cache_eviction = True
        made.cache_eviction_config = ov.CacheEvictionConfig(
            start_size=start,
            recent_size=recent,
            max_cache_size=most,
            aggregation_mode=getattr(ov.AggregationMode, mode),
            apply_rotation=rotate,
        )
    return made


def score(model, windows, threads):
    """Losses of the windows; with eviction, which begins after a prompt, tokens generated."""
    properties = {{**PROPERTIES, **PLAIN, "INFERENCE_NUM_THREADS": threads}}
    pipe = ov.ContinuousBatchingPipeline(model, scheduler(), "CPU", properties)
    config = ov.GenerationConfig()
    config.max_new_tokens = 1 if EVICTION is None else NEW
    config.logprobs, config.echo, config.ignore_eos = 1, EVICTION is None, True
    nll, made = [], 0
    for i, ids in enumerate(windows):
        handle = pipe.add_request(i, openvino.Tensor(np.array([ids], dtype=np.int64)), config)
        while pipe.has_non_finished_requests():
            pipe.step()
        (out,) = handle.read_all()
        made += len(out.generated_ids)
        nll.append([-x for x in out.generated_log_probs[1 : len(ids)]])
    found = {{"nll": nll if EVICTION is None else None}}
    if EVICTION is not None:
        found["generated"] = made
    return {{**found, "cache_bytes": pipe.get_metrics().cache_size_in_bytes}}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("prompt", nargs="?", default="Once upon a time")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=0, help="0: all")
    parser.add_argument("--score", help="JSON list of lists of token ids")
    parser.add_argument("--out", help="file for the losses")
    args = parser.parse_args()
    if args.score:
        with open(args.score, encoding="utf-8") as f:
            windows = json.load(f)
        with open(args.out, "wb") as f:
            f.write(json.dumps(score(args.model, windows, args.threads)).encode())
        return
    pipe = ov.LLMPipeline(args.model, "CPU", scheduler_config=scheduler(), **PROPERTIES)
    print(pipe.generate(args.prompt, max_new_tokens=args.tokens))


if __name__ == "__main__":
    main()
'''


def write(job: Job) -> Artefact:
    """`run.py`."""
    p = job.policy
    assert TARGET.executes is not None
    used = TARGET.executes.used(p)
    if used is None:
        properties: dict[str, object] = {"KV_CACHE_PRECISION": "f16"}
    else:
        key, value = used.word.split(",")
        properties = {"KEY_CACHE_PRECISION": key, "VALUE_CACHE_PRECISION": value}
        if used.group is not None:
            properties |= {
                "KEY_CACHE_GROUP_SIZE": used.group, "VALUE_CACHE_GROUP_SIZE": used.group
            }  # fmt: skip
    options, eviction = dict(properties), None
    if p.evicts:
        assert p.slots is not None and isinstance(p.rule, Attention)
        mode = "SUM" if p.rule.beta == 0 else "NORM_SUM"
        sizes = (p.sinks, p.recent_window, p.slots - p.interval)
        eviction = (*sizes, mode, p.positions == "cache")
        options |= dict(zip(("start_size", "recent_size", "max_cache_size"), sizes, strict=True))
        options |= {
            "aggregation_mode": mode,
            "apply_rotation": p.positions == "cache",
            "use_cache_eviction": True,
        }
    script = _SCRIPT.format(version=VERSION, properties=properties, eviction=eviction)
    return Artefact({"run.py": script}, {**options, "enable_prefix_caching": False})


TARGET = Target(
    name="openvino",
    runtime="openvino-genai",
    version=VERSION,
    knobs="eviction by summed attention (h2o, mean; heads together) in blocks of 32 after a "
    "prompt; "
    "u8 or u4 for keys and for values",
    executes=Capability(
        formats=FORMATS,
        eviction=Eviction(
            rankings=(Ranking(SUM), Ranking(NORM_SUM)),
            triggers=("prompt+stream",),
            positions=("original", "cache"),
            sinks=Sizes(step=BLOCK, low=BLOCK),
            recent_window=Sizes(step=BLOCK, low=BLOCK),
            slots=Sizes(step=BLOCK),
            interval=Sizes(only=(BLOCK,)),
            quantised=True,
            exact_when_quantised=True,
            reindexes_quantised=True,
            room=BLOCK,
        ),
    ),
    options={
        "INFERENCE_PRECISION_HINT": ("f32", "bf16", "f16"),
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": ("0", "32", "64", "128"),
        "KV_CACHE_PRECISION": ("u8", "u4", "u3", "bf16", "f16", "f32"),
        "KEY_CACHE_PRECISION": ("u8", "u4", "u3", "bf16", "f16", "f32"),
        "VALUE_CACHE_PRECISION": ("u8", "u4", "u3", "bf16", "f16", "f32"),
        "KEY_CACHE_GROUP_SIZE": int,
        "VALUE_CACHE_GROUP_SIZE": int,
        "start_size": int,
        "recent_size": int,
        "max_cache_size": int,
        "aggregation_mode": ("SUM", "NORM_SUM", "ADAPTIVE_RKV"),
        "apply_rotation": bool,
        "use_cache_eviction": bool,
        "enable_prefix_caching": bool,
    },
    write=write,
    proof="runs",
    notes=(
        "It evicts whole blocks of 32 tokens by the sum of their scores; a policy evicts tokens.",
        "It rounds a token when it comes, a policy at the next compaction.",
        "It rounds keys channel by channel over blocks of 32 tokens, a policy given here token by "
        "token: keys in u4 lose less there than predicted, PPL 3.7 % lower with groups of 32 "
        "(measured, 1023 tokens); u8 keys agree.",
        "Its own count of bytes is 9.5 bits a number for u8 at head size 64, 10 for K u8 with V u4 "
        "and 11 for u4 (kv_cache_size_in_bytes): scales in fp32, and each 4-bit number as a byte.",
    ),
    distribution="openvino-genai",
    environment=Environment(
        requirements=(f"openvino-genai=={VERSION}", "numpy"),
        about="about 100 MB of wheels",
        weights="fp16",  # its reader of GGUF files knows no fp32, and reads 4 bits to other numbers
    ),
)
