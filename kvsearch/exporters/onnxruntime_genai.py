"""ONNX Runtime GenAI: the cache type is fixed when the model is built. It keeps every token."""

import json

from kvsearch.errors import KvsearchError
from kvsearch.exporters.capability import Capability, Format
from kvsearch.exporters.target import Artefact, Job, Target

VERSION = "0.18.0"
SCHEMES = (
    "none", "int8_per_tensor", "int8_per_channel", "int8_per_token", "int4_per_tensor",
    "int4_per_channel", "int4_per_token", "fp8_per_tensor", "fp8_per_channel",
)  # fmt: skip
FORMATS = (Format("fp8_per_tensor", 8, 8, "e4m3"),)
SCALES = "kv-scales.json"


def write(job: Job) -> Artefact:
    """`build.sh`; fp8 with a file of scales of 1, one a layer."""
    assert TARGET.executes is not None
    used = TARGET.executes.used(job.policy)
    scheme = "none" if used is None else used.word
    extra = f"kv_cache_quant_scheme={scheme}"
    options: dict[str, object] = {"kv_cache_quant_scheme": scheme}
    files = {}
    if used is not None:
        extra += f' kv_cache_scale_file="$(dirname "$0")/{SCALES}"'
        options["kv_cache_scale_file"] = SCALES
        if job.shape is None:
            raise KvsearchError(
                "fp8 in onnxruntime_genai needs a scale for each layer; name the model with --model"
            )
        ones = [1.0] * (job.shape.layers + job.shape.others)
        files[SCALES] = json.dumps({"scales": {"k_scales": ones, "v_scales": ones}}) + "\n"
    where = "-p fp32 -e cpu" if used is None else "-p fp16 -e cuda"
    files["build.sh"] = (
        "#!/bin/sh\n# build.sh FOLDER_OF_THE_MODEL OUTPUT\n"
        f'exec python -m onnxruntime_genai.models.builder -i "$1" -o "$2" {where} '
        f"--extra_options {extra}\n"
    )
    return Artefact(files, options)


TARGET = Target(
    name="onnxruntime_genai",
    runtime="onnxruntime-genai",
    version=VERSION,
    knobs="fp8 in all layers; every token is kept",
    executes=Capability(formats=FORMATS),
    options={"kv_cache_quant_scheme": SCHEMES, "kv_cache_scale_file": str},
    write=write,
    notes=(
        "Its int8 and int4 per tensor and per channel have calibrated scales, which no policy "
        "carries, and per token they need paged attention on CUDA; nothing is mapped to them.",
        "fp8 needs CUDA: its builder makes an fp8 model for a CPU too, and onnxruntime 1.32.0 has "
        "no GroupQueryAttention for it there.",
    ),
    distribution="onnxruntime-genai",
)
