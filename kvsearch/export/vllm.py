"""vLLM's own cache types: fp8 for all layers but some. It keeps every token."""

from kvsearch.export.capability import Capability, Format
from kvsearch.export.layers import format_per_layer
from kvsearch.export.target import Artefact, Job, Target

VERSION = "0.33.0"
FORMATS = tuple(Format(f"fp8_{levels}", 8, 8, levels) for levels in ("e4m3", "e5m2"))


def write(job: Job) -> Artefact:
    """`serve.sh`: the command with its flags."""
    assert TARGET.executes is not None
    per_layer = format_per_layer(job, TARGET.executes)
    used = next((f.word for f in per_layer if f is not None), "auto")
    options: dict[str, object] = {"--kv-cache-dtype": used}
    flags = f"--kv-cache-dtype {used}"
    skipped = [str(i) for i, f in enumerate(per_layer) if f is None]
    if used != "auto" and skipped:
        options["--kv-cache-dtype-skip-layers"] = " ".join(skipped)
        flags += f" --kv-cache-dtype-skip-layers {' '.join(skipped)}"
    script = f'#!/bin/sh\nexec vllm serve "${{1:-{job.model}}}" {flags}\n'
    return Artefact({"serve.sh": script}, options)


TARGET = Target(
    name="vllm",
    runtime="vllm",
    version=VERSION,
    knobs="fp8 (e4m3, e5m2) in all layers but some; every token is kept",
    executes=Capability(formats=FORMATS, layers="exceptions"),
    options={
        "--kv-cache-dtype": (
            "auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_ds_mla",
            "nvfp4_ds_mla", "turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc",
            "turboquant_3bit_nc", "octave_k3v4", "octave_k3v3", "octave_k3v3_compact",
            "ultraquant_4bit", "int4_per_token_head", "int8_per_token_head", "fp8_per_token_head",
            "nvfp4", "nvfp4_4over6",
        ),
        "--kv-cache-dtype-skip-layers": str,
    },
    write=write,
    notes=(
        "Scales are 1 unless the checkpoint brings others.",
        "vLLM's other types have no form in a policy, so nothing is mapped to them.",
    ),
    distribution="vllm",
)  # fmt: skip
