"""ExecuTorch: attention sinks and a ring of recent tokens, or 8 bits; fixed when exporting."""

import yaml

from kvsearch.export.capability import ONE, Capability, Eviction, Format
from kvsearch.export.target import Artefact, Job, Target

VERSION = "1.5.1"


def write(job: Job) -> Artefact:
    """`kv-cache.yaml` for `extension.llm.export.export_llm`, and `export.sh` that uses it."""
    p = job.policy
    model: dict[str, object] = {"use_kv_cache": True, "quantize_kv_cache": p.quantizes}
    if p.evicts:
        assert p.slots is not None
        model["use_attention_sink"] = f"{p.sinks},{p.slots - p.sinks}"
    script = (
        "#!/bin/sh\n# further settings of the model follow as arguments, such as "
        "base.checkpoint=FILE\n"
        'exec python -m extension.llm.export.export_llm --config "$(dirname "$0")/kv-cache.yaml" '
        '"$@"\n'
    )
    text = yaml.safe_dump({"model": model}, sort_keys=False)
    options = {**model, "--config": "kv-cache.yaml", "model": "mapping"}
    return Artefact({"kv-cache.yaml": text, "export.sh": script}, options)


TARGET = Target(
    name="executorch",
    runtime="executorch",
    version=VERSION,
    knobs="sinks and a window in 16 bits; or 8 bits for every token",
    executes=Capability(
        formats=(Format("int8", 8, 8, "uniform", group=None),),
        eviction=Eviction(interval=ONE),
    ),
    options={
        "use_kv_cache": bool,
        "quantize_kv_cache": bool,
        "use_attention_sink": str,
        "--config": str,
        "model": ("mapping",),
    },
    write=write,
    notes=(
        "Its ring holds twice the window, so it takes more memory than the policy counts.",
        "Its 8 bits have a whole zero point and wider scales than ours.",
    ),
    distribution="executorch",
)
