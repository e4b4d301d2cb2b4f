"""TensorRT-LLM: fp8 for all layers, and a window for each layer."""

import yaml

from kvsearch.exporters.capability import ONE, Capability, Eviction, Format, Sizes
from kvsearch.exporters.layers import slots_per_layer
from kvsearch.exporters.shell import serve
from kvsearch.exporters.target import Artefact, Job, Target

VERSION = "1.3.0rc27"
NONE = Sizes(only=(0,))


def write(job: Job) -> Artefact:
    """`extra-llm-api-options.yaml`, and `serve.sh` that uses it."""
    p = job.policy
    config: dict[str, object] = {"dtype": "auto" if not p.quantizes else "fp8"}
    if p.evicts:
        config["max_attention_window"] = slots_per_layer(job)
        config["enable_block_reuse"] = False
    name = "extra-llm-api-options.yaml"
    command = f'trtllm-serve "$model" --extra_llm_api_options "$(dirname "$0")/{name}"'
    text = yaml.safe_dump({"kv_cache_config": config}, default_flow_style=None, sort_keys=False)
    options = {**config, "--extra_llm_api_options": name, "kv_cache_config": "mapping"}
    return Artefact({name: text, "serve.sh": serve(job.model, command)}, options)


TARGET = Target(
    name="tensorrt_llm",
    runtime="tensorrt_llm",
    version=VERSION,
    knobs="fp8 in all layers; a window for each layer",
    executes=Capability(
        formats=(Format("fp8", 8, 8, "e4m3"),),
        eviction=Eviction(interval=ONE, sinks=NONE, budgets=True, quantised=True),
    ),
    options={
        "dtype": ("auto", "fp8", "nvfp4"),
        "max_attention_window": list,
        "enable_block_reuse": bool,
        "--extra_llm_api_options": str,
        "kv_cache_config": ("mapping",),
    },
    write=write,
    notes=(
        "Its PyTorch backend, the only one left, takes sink_token_length and attends without sinks "
        "(pull request 14275 there; read, not run), so no sinks are mapped to it.",
        "Memory goes in blocks of tokens_per_block (32); scales of fp8 come from the checkpoint.",
    ),
    distribution="tensorrt_llm",
)
