"""Runtimes that are given a file or flags, and that we do not run: MLX-LM, SGLang, TensorRT-LLM,
ONNX Runtime GenAI, ExecuTorch, Ollama.

Each has what it can execute, a table of its options in that version, and what is written for it.
"""

import json
from pathlib import Path

import yaml

from kvsearch.errors import KvsearchError
from kvsearch.exporters.capability import ONE, Capability, Eviction, Format, Sizes
from kvsearch.exporters.layers import format_per_layer, slots_per_layer
from kvsearch.exporters.target import Artefact, Job, Target, serve


def _word(target: Target, job: Job, otherwise: str) -> str:
    """The runtime's word for the format of a policy; `otherwise` where it is 16 bits."""
    assert target.executes is not None
    used = target.executes.used(job.policy)
    return otherwise if used is None else used.word


# -- SGLang ------------------------------------------------------------------------------------


def _sglang(job: Job) -> Artefact:
    """`serve.sh`: the command with its flag."""
    word = _word(SGLANG, job, "auto")
    command = f'python -m sglang.launch_server --model-path "$model" --kv-cache-dtype {word}'
    options = {"--kv-cache-dtype": word, "--model-path": job.model}
    return Artefact({"serve.sh": serve(job.model, command)}, options)


SGLANG = Target(
    name="sglang",
    runtime="sglang",
    version="0.5.23",
    knobs="fp8 (e4m3, e5m2) in all layers; every token is kept",
    executes=Capability(
        formats=tuple(Format(f"fp8_{levels}", 8, 8, levels) for levels in ("e4m3", "e5m2"))
    ),
    options={
        "--kv-cache-dtype": (
            "auto", "fp8_e5m2", "fp8_e4m3", "mxfp8", "bf16", "bfloat16", "nvfp4", "fp4_mx_block16",
        ),
        "--model-path": str,
    },
    write=_sglang,
    notes=("Scales are 1 unless --quantization-param-path brings others.",),
    distribution="sglang",
)  # fmt: skip


# -- TensorRT-LLM ------------------------------------------------------------------------------


def _tensorrt_llm(job: Job) -> Artefact:
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


TENSORRT_LLM = Target(
    name="tensorrt_llm",
    runtime="tensorrt_llm",
    version="1.3.0rc27",
    knobs="fp8 in all layers; a window for each layer",
    executes=Capability(
        formats=(Format("fp8", 8, 8, "e4m3"),),
        eviction=Eviction(interval=ONE, sinks=Sizes(only=(0,)), budgets=True, quantised=True),
    ),
    options={
        "dtype": ("auto", "fp8", "nvfp4"),
        "max_attention_window": list,
        "enable_block_reuse": bool,
        "--extra_llm_api_options": str,
        "kv_cache_config": ("mapping",),
    },
    write=_tensorrt_llm,
    notes=(
        "Its PyTorch backend, the only one left, takes sink_token_length and attends without sinks "
        "(pull request 14275 there; read, not run), so no sinks are mapped to it.",
        "Memory goes in blocks of tokens_per_block (32); scales of fp8 come from the checkpoint.",
    ),
    distribution="tensorrt_llm",
)


# -- ONNX Runtime GenAI ------------------------------------------------------------------------


def _onnxruntime_genai(job: Job) -> Artefact:
    """`build.sh`; fp8 with a file of scales of 1, one a layer."""
    scheme, scales = _word(ONNXRUNTIME_GENAI, job, "none"), "kv-scales.json"
    extra = f"kv_cache_quant_scheme={scheme}"
    options: dict[str, object] = {"kv_cache_quant_scheme": scheme}
    files, where = {}, "-p fp32 -e cpu"
    if scheme != "none":
        extra += f' kv_cache_scale_file="$(dirname "$0")/{scales}"'
        options["kv_cache_scale_file"] = scales
        if job.shape is None:
            raise KvsearchError(
                "fp8 in onnxruntime_genai needs a scale for each layer; name the model with --model"
            )
        ones = [1.0] * (job.shape.layers + job.shape.others)
        files[scales] = json.dumps({"scales": {"k_scales": ones, "v_scales": ones}}) + "\n"
        where = "-p fp16 -e cuda"
    files["build.sh"] = (
        "#!/bin/sh\n# build.sh FOLDER_OF_THE_MODEL OUTPUT\n"
        f'exec python -m onnxruntime_genai.models.builder -i "$1" -o "$2" {where} '
        f"--extra_options {extra}\n"
    )
    return Artefact(files, options)


ONNXRUNTIME_GENAI = Target(
    name="onnxruntime_genai",
    runtime="onnxruntime-genai",
    version="0.18.0",
    knobs="fp8 in all layers; every token is kept",
    executes=Capability(formats=(Format("fp8_per_tensor", 8, 8, "e4m3"),)),
    options={
        "kv_cache_quant_scheme": (
            "none", "int8_per_tensor", "int8_per_channel", "int8_per_token", "int4_per_tensor",
            "int4_per_channel", "int4_per_token", "fp8_per_tensor", "fp8_per_channel",
        ),
        "kv_cache_scale_file": str,
    },
    write=_onnxruntime_genai,
    notes=(
        "Its int8 and int4 per tensor and per channel have calibrated scales, which no policy "
        "carries, and per token they need paged attention on CUDA; nothing is mapped to them.",
        "fp8 needs CUDA: its builder makes an fp8 model for a CPU too, and onnxruntime 1.32.0 has "
        "no GroupQueryAttention for it there.",
    ),
    distribution="onnxruntime-genai",
)  # fmt: skip


# -- ExecuTorch --------------------------------------------------------------------------------

DEFAULT_LENGTH = 128  # tokens of a call and of a context, where nothing says otherwise


def _executorch(job: Job) -> Artefact:
    """`kv-cache.yaml` for `extension.llm.export.export_llm`, and `export.sh` that uses it."""
    p = job.policy
    model: dict[str, object] = {"use_kv_cache": True, "quantize_kv_cache": p.quantizes}
    # with its own settings below, so that arguments may set what the file does not
    config: dict[str, object] = {"defaults": ["llm_config", "_self_"], "model": model}
    export: dict[str, object] = {}
    if p.evicts:
        assert p.slots is not None
        window = p.slots - p.sinks
        model["use_attention_sink"] = f"{p.sinks},{window}"
        # positions of the sinks and the whole ring; no call may be longer than the window
        export |= {
            "max_seq_length": min(DEFAULT_LENGTH, window),
            "max_context_length": p.sinks + 2 * window,
        }
        config["export"] = export
    length = "" if p.evicts else " export.max_context_length=TOKENS"
    script = (
        "#!/bin/sh\n# further settings of the model follow as arguments, such as "
        f"base.checkpoint=FILE{length}\n"
        "exec python -m executorch.extension.llm.export.export_llm "
        '--config "$(dirname "$0")/kv-cache.yaml" "$@"\n'
    )
    text = yaml.safe_dump(config, sort_keys=False)
    options = {**model, **export, "--config": "kv-cache.yaml", "defaults": config["defaults"]}
    return Artefact({"kv-cache.yaml": text, "export.sh": script}, options)


EXECUTORCH = Target(
    name="executorch",
    runtime="executorch",
    version="1.5.1",
    knobs="sinks and a window in 16 bits; or 8 bits for every token",
    executes=Capability(
        formats=(Format("int8", 8, 8, "uniform", group=None),),
        eviction=Eviction(interval=ONE),
    ),
    options={
        "use_kv_cache": bool,
        "quantize_kv_cache": bool,
        "use_attention_sink": str,
        "max_seq_length": int,
        "max_context_length": int,
        "--config": str,
        "defaults": ("llm_config", "_self_"),
    },
    write=_executorch,
    notes=(
        "Its ring holds twice the window, so it takes more memory than the policy counts.",
        "Rotary positions start again behind the sinks after two windows, so keys before that seam "
        "and queries after it have other distances than in a policy.",
        "Without sinks and a window its context is export.max_context_length, 128 tokens unless "
        "given.",
        "Its 8 bits have a whole zero point and wider scales than ours.",
    ),
    distribution="executorch",
)


# -- MLX-LM ------------------------------------------------------------------------------------

_MLX_SCRIPT = '''"""Generate with MLX-LM and this KV-cache policy.

    python run.py MODEL "once upon a time"

Needs: pip install mlx-lm=={version}
"""

import sys

from mlx_lm import generate, load
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache

LAYERS = {layers}  # one for each layer, or a single one for all


def made(layer):
    if "max_size" in layer:
        return RotatingKVCache(max_size=layer["max_size"], keep=layer["keep"])
    if "bits" in layer:
        return QuantizedKVCache(group_size=layer["group_size"], bits=layer["bits"])
    return KVCache()


if len(sys.argv) != 3:
    sys.exit('usage: python run.py MODEL "the prompt"')
model, tokenizer = load(sys.argv[1])
count = len(model.layers)
layers = LAYERS * count if len(LAYERS) == 1 else LAYERS
if len(layers) != count:
    raise SystemExit(f"the policy is for {{len(layers)}} layers, the model has {{count}}")
cache = [made(layer) for layer in layers]
print(generate(model, tokenizer, prompt=sys.argv[2], max_tokens=64, prompt_cache=cache{given}))
'''


def _mlx(job: Job) -> Artefact:
    """`run.py`."""
    assert MLX.executes is not None
    given: dict[str, int] = {}
    if job.policy.evicts:
        sizes = slots_per_layer(job)
        layers = [dict(max_size=n, keep=job.policy.sinks) for n in sizes]
        given["prefill_step_size"] = 1
    else:
        formats = format_per_layer(job, MLX.executes)
        layers = [
            {} if f is None else dict(bits=f.key_bits, group_size=f.group or 0) for f in formats
        ]
    options = {name: value for layer in layers for name, value in layer.items()}
    more = "".join(f", {k}={v}" for k, v in given.items())
    text = _MLX_SCRIPT.format(version=MLX.version, layers=layers, given=more)
    return Artefact({"run.py": text}, options | given)


MLX = Target(
    name="mlx",
    runtime="mlx-lm",
    version="0.32.2",
    knobs="sinks and a window of 16 bits, or 8, 4, 3 or 2 bits in groups of 32, 64 or 128; either "
    "of them layer by layer",
    executes=Capability(
        formats=tuple(
            Format(f"{bits},{group}", bits, bits, "uniform", group=group, divides=group)
            for group in (64, 32, 128)
            for bits in (8, 4, 3, 2)
        ),
        layers="free",
        eviction=Eviction(interval=ONE, budgets=True),
    ),
    options={
        "max_size": int,
        "keep": int,
        "prefill_step_size": int,
        "group_size": (32, 64, 128),
        "bits": (2, 3, 4, 5, 6, 8),
    },
    write=_mlx,
    notes=(
        "Its steps are moved a little so that zero is one of the levels; ours are not.",
        "It rounds a token when it comes, a policy after the token's own step.",
        "run.py gives a rotating cache its prompt token by token: in a call of many, all layers "
        "see the first one's window without sinks, and fail where their sizes differ.",
    ),
    distribution="mlx-lm",
)


# -- Ollama ------------------------------------------------------------------------------------


def half(slots: int, sinks: int) -> int:
    """Tokens that a full context drops: half of what is not kept."""
    return max(1, (slots - sinks) // 2)


def _ollama(job: Job) -> Artefact:
    """`serve.sh` with the server's variables, and a `Modelfile` with the context."""
    p, word = job.policy, _word(OLLAMA, job, "f16")
    options: dict[str, object] = {"OLLAMA_KV_CACHE_TYPE": word, "OLLAMA_FLASH_ATTENTION": "1"}
    script = f"#!/bin/sh\nOLLAMA_FLASH_ATTENTION=1 OLLAMA_KV_CACHE_TYPE={word} exec ollama serve\n"
    # Ollama looks for a relative path beside the Modelfile
    model = Path(job.model).resolve() if Path(job.model).exists() else job.model
    lines = [
        "# FROM takes a name in Ollama's library, a folder of safetensors or a .gguf file",
        f"FROM {model}",
    ]
    if p.evicts:
        options |= {"num_ctx": p.slots, "num_keep": p.sinks}
        lines += [f"PARAMETER num_ctx {p.slots}", f"PARAMETER num_keep {p.sinks}"]
    else:
        lines.append("# PARAMETER num_ctx TOKENS  (else 4096: more are dropped by halves)")
    return Artefact({"serve.sh": script, "Modelfile": "\n".join(lines) + "\n"}, options)


OLLAMA = Target(
    name="ollama",
    runtime="ollama",
    version="0.12",
    knobs="f16, q8_0 or q4_0 for keys and values alike; sinks, and a context that drops its "
    "older half when it is full",
    executes=Capability(
        formats=tuple(
            Format(name, bits, bits, "ggml-0", group=32, divides=32)
            for name, bits in (("q8_0", 8), ("q4_0", 4))
        ),
        eviction=Eviction(positions=("cache",), interval=half, sinks=Sizes()),
    ),
    options={
        "OLLAMA_KV_CACHE_TYPE": ("f16", "q8_0", "q4_0"),
        "OLLAMA_FLASH_ATTENTION": ("0", "1"),
        "num_ctx": int,
        "num_keep": int,
    },
    write=_ollama,
    notes=(
        "Where every token is kept its context is num_ctx of the Modelfile or "
        "OLLAMA_CONTEXT_LENGTH, 4096 tokens unless given; when it is full the older half goes.",
        "Its first shift comes when the context is full, a policy's at a multiple of the interval.",
        "It can shift a quantised context too, but a policy that evicts by halves would hold that "
        "half in 16 bits, so evicting policies are exported in f16.",
        "Whether its engine rotates a quantised cache as llama.cpp does is not established.",
    ),
)
