"""ExecuTorch: attention sinks and a ring of recent tokens, or 8 bits; fixed when exporting."""

import yaml

from kvsearch.exporters.capability import ONE, Capability, Eviction, Format
from kvsearch.exporters.target import Artefact, Job, Target

VERSION = "1.5.1"
DEFAULT_LENGTH = 128  # tokens of a call and of a context, where nothing says otherwise


def write(job: Job) -> Artefact:
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
        "max_seq_length": int,
        "max_context_length": int,
        "--config": str,
        "defaults": ("llm_config", "_self_"),
    },
    write=write,
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
