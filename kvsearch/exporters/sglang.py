"""SGLang: one cache type for all layers. It keeps every token."""

from kvsearch.exporters.capability import Capability, Format
from kvsearch.exporters.shell import serve
from kvsearch.exporters.target import Artefact, Job, Target

VERSION = "0.5.23"
FORMATS = tuple(Format(f"fp8_{levels}", 8, 8, levels) for levels in ("e4m3", "e5m2"))


def write(job: Job) -> Artefact:
    """`serve.sh`: the command with its flag."""
    assert TARGET.executes is not None
    used = TARGET.executes.used(job.policy)
    word = "auto" if used is None else used.word
    command = f'python -m sglang.launch_server --model-path "$model" --kv-cache-dtype {word}'
    options = {"--kv-cache-dtype": word, "--model-path": job.model}
    return Artefact({"serve.sh": serve(job.model, command)}, options)


TARGET = Target(
    name="sglang",
    runtime="sglang",
    version=VERSION,
    knobs="fp8 (e4m3, e5m2) in all layers; every token is kept",
    executes=Capability(formats=FORMATS),
    options={
        "--kv-cache-dtype": (
            "auto", "fp8_e5m2", "fp8_e4m3", "mxfp8", "bf16", "bfloat16", "nvfp4", "fp4_mx_block16",
        ),
        "--model-path": str,
    },
    write=write,
    notes=("Scales are 1 unless --quantization-param-path brings others.",),
    distribution="sglang",
)  # fmt: skip
