"""Runtimes that are told the bits of each layer, and that we do not run: ik_llama.cpp, ModelOpt,
turbo-attn.

Each has what it can execute, a table of its options in that version, and what is written for it.
"""

import json
from itertools import groupby, pairwise, product
from typing import Any

from kvsearch.errors import KvsearchError
from kvsearch.exporters import llamacpp
from kvsearch.exporters.capability import Capability, Format
from kvsearch.exporters.layers import bits_per_layer, format_per_layer
from kvsearch.exporters.target import Artefact, Job, Target, serve

# -- ik_llama.cpp ------------------------------------------------------------------------------


def _ik_llama(job: Job) -> Artefact:
    """`server.sh`; the first and the last layers get their types by options of their own."""
    assert IK_LLAMA.executes is not None
    p = job.policy
    names = llamacpp.NAMES.get(p.quantizer.levels, llamacpp.NAMES["ggml-0"])
    options: dict[str, Any] = {"--flash-attn": "on"}  # without it there are no quantised values
    words = ["--flash-attn on"]
    bits = bits_per_layer(job, IK_LLAMA.executes)
    for side, of_layers in zip("kv", zip(*bits, strict=True), strict=True):
        runs = [(number, len([*same])) for number, same in groupby(of_layers)]
        # the type of all other layers; the Hadamard rotation is left out where that is 16 bits
        at = 1 if len(runs) == 3 else runs.index(min(runs))
        base = runs[at][0]
        options[f"--cache-type-{side}"] = names[base]
        words.append(f"--cache-type-{side} {names[base]}")
        if p.quantizer.rotate and base < 16:
            options[f"--{side}-cache-hadamard"] = True
            words.append(f"--{side}-cache-hadamard")
        for place, ends in (("first", runs[:at]), ("last", runs[at + 1 :])):
            for number, count in ends:
                options[f"--cache-type-{side}-{place}"] = names[number], count
                words.append(f"--cache-type-{side}-{place} {names[number]},{count}")
    command = " \\\n  ".join(["exec llama-server", *words, '--model "$@"'])
    return Artefact({"server.sh": f"#!/bin/sh\n{command}\n"}, options)


_TYPES = ("f16", "bf16", "f32", "q8_0", "q8_KV", "q6_0", "q5_0", "q5_1", "q4_0", "q4_1", "iq4_nl")

IK_LLAMA = Target(
    name="ik_llama",
    runtime="ik_llama.cpp",
    version="8337e4cd (2026-08-15)",
    knobs="q8_0, q5_0, q5_1, q4_0, q4_1 or f16 for keys and for values, with or without rotation, "
    "and others for the first and the last layers; every token is kept",
    executes=Capability(formats=llamacpp.formats(None), layers="ends"),
    options={
        **{f"--cache-type-{side}": _TYPES for side in "kv"},
        **{
            f"--cache-type-{side}-{place}": (*_TYPES, *range(1, 513))  # LLAMA_MAX_LAYERS
            for side, place in product("kv", ("first", "last"))
        },
        **{f"--{side}-cache-hadamard": bool for side in "kv"},
        "--flash-attn": ("on", "off", "auto", "1", "0"),
    },
    write=_ik_llama,
    notes=(
        "Its q4_0 searches for the step of a block, where ours is that of llama.cpp.",
        "It rotates the 16-bit layers beside rotated ones too, and rounds a token when it comes, a "
        "policy after the token's own step.",
        "Layers for multi-token prediction, where a GGUF file has some, count among the last ones.",
    ),
)


# -- ModelOpt ----------------------------------------------------------------------------------


def _modelopt(job: Job) -> Artefact:
    """`hf_quant_config.json`, for the folder of a checkpoint whose weights are not quantised."""
    assert MODELOPT.executes is not None
    formats = format_per_layer(job, MODELOPT.executes)
    words = [None if f is None else f.word for f in formats]
    word = next((w for w in words if w is not None), None)  # one that all of them share
    options: dict[str, Any] = {"quant_algo": None, "kv_cache_quant_algo": word}
    if len(words) > 1:
        options["kv_cache_quantized_layers"] = {
            f"model.layers.{i}.self_attn": {"quant_algo": w} for i, w in enumerate(words) if w
        }
        options["kv_cache_schema_version"] = 1
    producer = {"name": "modelopt", "version": MODELOPT.version}
    text = json.dumps({"producer": producer, "quantization": options}, indent=2) + "\n"
    return Artefact({"hf_quant_config.json": text}, {**options, "producer": producer})


_ALGORITHMS = (None, "FP8", "NVFP4", "FP8_K_NVFP4_V", "MIXED_PRECISION")

MODELOPT = Target(
    name="modelopt",
    runtime="ModelOpt",
    version="KV-cache schema 1",
    knobs="fp8 (e4m3), nvfp4, or fp8 for keys and nvfp4 for values, in all layers but some; every "
    "token is kept",
    executes=Capability(
        formats=(
            Format("FP8", 8, 8, "e4m3"),
            Format("NVFP4", 4, 4, "nvfp4", group=32, divides=32),
            Format("FP8_K_NVFP4_V", 8, 4, "e4m3", 32, divides=32, value_levels="nvfp4"),
        ),
        layers="exceptions",
    ),
    options={
        "producer": dict,
        "quant_algo": _ALGORITHMS,
        "kv_cache_quant_algo": _ALGORITHMS,
        "kv_cache_quantized_layers": dict,
        "kv_cache_schema_version": (1,),
    },
    write=_modelopt,
    notes=(
        "It is a form of checkpoints: put hf_quant_config.json beside weights that are not "
        "quantised, and into the file that is there where they are.",
        "vLLM 0.32.0 reads it only where it names an algorithm of the weights, too, and one format "
        "for all layers (its source; not run); kv_cache_quantized_layers it reads by an open pull "
        "request (56116), which does not take fp8 keys beside nvfp4 values.",
        "Layers are called model.layers.N.self_attn; where a model's have other names, the keys "
        "have to be changed.",
        "Scales are 1 unless the checkpoint brings others, as in ModelOpt's recipes by cast.",
        "It can mix FP8 and NVFP4 layers, which a policy, whose layers share levels, cannot say.",
    ),
)  # fmt: skip


# -- turbo-attn --------------------------------------------------------------------------------

_BITS = (8, 5, 4, 3, 2)
_ROW = 16  # bytes, to which it rounds what a layer holds of a token


def _turbo_attn(job: Job) -> Artefact:
    """`serve.sh`; where layers differ, `calibration.json` with their bits and levels, too."""
    assert TURBO_ATTN.executes is not None
    bits = bits_per_layer(job, TURBO_ATTN.executes)
    options: dict[str, Any] = {"--kv-cache-dtype": "tkv" if job.policy.quantizes else "auto"}
    files, variables = {}, {}
    if job.policy.quantizes:
        options["--attention-backend"] = "TURBO_ATTN"
        variables = {"VLLM_PLUGINS": "tkv", "TKV_RECENT_RING": "0"}
    if len(bits) > 1:
        made, budget = _calibration(job, bits)
        files["calibration.json"] = json.dumps(made, separators=(",", ":")) + "\n"
        options |= made
        variables["TKV_BITS"] = f"{budget:g}"
        variables["TKV_CALIBRATION_FILE"] = '"$(dirname "$0")/calibration.json"'
    elif job.policy.quantizes:
        ((k, v),) = bits
        variables |= {"TKV_BITS": f"k{k}v{v}", "TKV_CALIBRATION": "none"}
    set_to = "".join(f"{name}={word} " for name, word in variables.items())
    flags = " ".join(f"{name} {word}" for name, word in options.items() if name.startswith("--"))
    command = f'vllm serve "$model" {flags}'
    script = serve(job.model, command).replace("\nexec ", f"\n{set_to}exec ")
    return Artefact({**files, "serve.sh": script}, {**options, **variables})


def _calibration(job: Job, bits: list[tuple[int, int]]) -> tuple[dict[str, Any], float]:
    """A store of the levels that our evaluator has, one pinned allocation, and its budget in bits.

    Rotated vectors of length 1 have channels of variance 1 / D, and no scales of their own.
    """
    if job.shape is None:
        raise KvsearchError(
            "layers that differ need turbo_attn to have a calibration file with their heads; name "
            "the model with --model"
        )
    heads, D = job.shape.kv_heads, job.shape.head_dim
    names = [str(i) for i in range(len(bits))]
    layers = {
        name: {
            "layer_type": "full_attention",
            "head_dim": D,
            "padded_dim": D,
            f"k_bits_{k}": _levels(k, D),
            f"v_bits_{v}": _levels(v, D),
        }
        for name, (k, v) in zip(names, bits, strict=True)
    }
    # a budget has to hold what a layer's row is rounded up by, and is no whole number, which would
    # be the bits of every layer
    mean = sum(map(sum, bits)) / 2 / len(bits) + 8 * _ROW / (2 * heads * D)
    budget = (int(mean * 4) + 1) / 4
    budget += 0.25 * budget.is_integer()
    pin = {"bpe": budget, "allocation": dict(zip(names, map(list, bits), strict=True))}
    basis, quantizer = "hadamard", "lloyd"
    ones = dict.fromkeys(names, [1.0] * D)
    store = {
        "schema_version": 59,
        "model": {
            "path": job.model,
            "num_kv_heads": heads,
            "head_dim": D,
            "full_attention_layers": [*range(len(bits))],
        },
        "bases": {basis: {"kind": basis}},
        "calibrations": {
            f"{basis}/{quantizer}": {
                "basis": basis,
                "quantizer": quantizer,
                "per_channel_scales": {"k": ones, "v": ones},
                "layers": layers,
            }
        },
        "allocations": {basis: {"pin": pin}},
    }
    return store, budget


def _levels(bits: int, D: int) -> dict[str, Any]:
    """A cell of the store: levels of N(0, 1 / D), and where one ends and the next begins."""
    from kvsearch_kernels.codebooks.gaussian import lloyd_levels  # loads torch

    found = [float(f"{x * D**-0.5:.7g}") for x in lloyd_levels(bits).tolist()]
    middles = [(a + b) / 2 for a, b in pairwise(found)]
    return {
        "centroids": found,
        "boundaries": middles,
        "served_source": "analytic",
        "source_forced": True,
    }


TURBO_ATTN = Target(
    name="turbo_attn",
    runtime="turbo-attn",
    version="0.70.1",
    knobs="8, 5, 4, 3 or 2 bits for keys and for values, rotated, layer by layer; every token is "
    "kept",
    executes=Capability(
        formats=tuple(
            Format(f"k{k}v{v}", k, v, "lloyd", rotate=True, whole_power=True)
            for k, v in product(_BITS, repeat=2)
        ),
        layers="below",
    ),
    options={
        "--kv-cache-dtype": ("auto", "tkv"),
        "--attention-backend": ("TURBO_ATTN",),
        "VLLM_PLUGINS": ("tkv",),
        "TKV_RECENT_RING": ("0", "1"),
        "TKV_BITS": str,
        "TKV_CALIBRATION": ("none",),
        "TKV_CALIBRATION_FILE": str,
        "schema_version": (59,),
        "model": dict,
        "bases": dict,
        "calibrations": dict,
        "allocations": dict,
    },
    write=_turbo_attn,
    notes=(
        "serve.sh is for its fork of vLLM, on GPUs of compute capability 8.x or 12.0.",
        "Levels are those of a Gaussian, as predicted; fitted to the model "
        "(python -m tkv.auto_calibrate) they lose less, but a file with fitted levels has no "
        "allocation of ours.",
        "It scales keys to their length and values by it, in bf16, where ours fit the scale; its "
        "own 8-bit levels, where all layers are alike, are not even.",
        "Without TKV_RECENT_RING=0 it keeps the newest 128 tokens in 8 bits too, beside the rest.",
    ),
    distribution="turbo-attn",
)
