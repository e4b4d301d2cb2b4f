"""Ollama: one cache type for all models of a server, and a context that shifts by halves."""

from pathlib import Path

from kvsearch.exporters.capability import Capability, Eviction, Format, Sizes
from kvsearch.exporters.target import Artefact, Job, Target

VERSION = "0.12"
FORMATS = tuple(
    Format(name, bits, bits, "ggml-0", group=32, divides=32)
    for name, bits in (("q8_0", 8), ("q4_0", 4))
)


def half(slots: int, sinks: int) -> int:
    """Tokens that a full context drops: half of what is not kept."""
    return max(1, (slots - sinks) // 2)


def write(job: Job) -> Artefact:
    """`serve.sh` with the server's variables, and a `Modelfile` with the context."""
    p = job.policy
    assert TARGET.executes is not None
    used = TARGET.executes.used(p)
    word = "f16" if used is None else used.word
    options: dict[str, object] = {"OLLAMA_KV_CACHE_TYPE": word, "OLLAMA_FLASH_ATTENTION": "1"}
    serve = f"#!/bin/sh\nOLLAMA_FLASH_ATTENTION=1 OLLAMA_KV_CACHE_TYPE={word} exec ollama serve\n"
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
    return Artefact({"serve.sh": serve, "Modelfile": "\n".join(lines) + "\n"}, options)


TARGET = Target(
    name="ollama",
    runtime="ollama",
    version=VERSION,
    knobs="f16, q8_0 or q4_0 for keys and values alike; sinks, and a context that drops its "
    "older half when it is full",
    executes=Capability(
        formats=FORMATS,
        eviction=Eviction(positions=("cache",), interval=half, sinks=Sizes()),
    ),
    options={
        "OLLAMA_KV_CACHE_TYPE": ("f16", "q8_0", "q4_0"),
        "OLLAMA_FLASH_ATTENTION": ("0", "1"),
        "num_ctx": int,
        "num_keep": int,
    },
    write=write,
    notes=(
        "Where every token is kept its context is num_ctx of the Modelfile or "
        "OLLAMA_CONTEXT_LENGTH, 4096 tokens unless given; when it is full the older half goes.",
        "Its first shift comes when the context is full, a policy's at a multiple of the interval.",
        "It can shift a quantised context too, but a policy that evicts by halves would hold that "
        "half in 16 bits, so evicting policies are exported in f16.",
        "Whether its engine rotates a quantised cache as llama.cpp does is not established.",
    ),
)
