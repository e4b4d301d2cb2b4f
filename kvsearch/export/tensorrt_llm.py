"""TensorRT-LLM: fp8 for all layers, sinks, and a window for each layer."""

import yaml

from kvsearch.export.capability import ONE, Capability, Eviction, Format
from kvsearch.export.layers import slots_per_layer
from kvsearch.export.shell import serve
from kvsearch.export.target import Artefact, Job, Target

VERSION = "1.3.0rc27"


def write(job: Job) -> Artefact:
    """`extra-llm-api-options.yaml`, and `serve.sh` that uses it."""
    p = job.policy
    config: dict[str, object] = {"dtype": "auto" if not p.quantizes else "fp8"}
    if p.evicts:
        config["max_attention_window"] = slots_per_layer(job)
        config["enable_block_reuse"] = False
        if p.sinks:
            config["sink_token_length"] = p.sinks
    name = "extra-llm-api-options.yaml"
    command = f'trtllm-serve "$model" --extra_llm_api_options "$(dirname "$0")/{name}"'
    text = yaml.safe_dump({"kv_cache_config": config}, default_flow_style=None, sort_keys=False)
    options = {**config, "--extra_llm_api_options": name, "kv_cache_config": "mapping"}
    return Artefact({name: text, "serve.sh": serve(job.model, command)}, options)


TARGET = Target(
    name="tensorrt_llm",
    runtime="tensorrt_llm",
    version=VERSION,
    knobs="fp8 in all layers; sinks, and a window for each layer",
    executes=Capability(
        formats=(Format("fp8", 8, 8, "e4m3"),),
        eviction=Eviction(interval=ONE, budgets=True, quantised=True),
    ),
    options={
        "dtype": ("auto", "fp8", "nvfp4"),
        "max_attention_window": list,
        "sink_token_length": int,
        "enable_block_reuse": bool,
        "--extra_llm_api_options": str,
        "kv_cache_config": ("mapping",),
    },
    write=write,
    notes=(
        "Whether its PyTorch backend heeds sink_token_length is not established.",
        "Memory goes in blocks of tokens_per_block (32); scales of fp8 come from the checkpoint.",
    ),
    distribution="tensorrt_llm",
)
