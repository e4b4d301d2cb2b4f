"""Policies for other people's runtimes. One line a target in `TARGETS`, and a file if it is run."""

from collections.abc import Iterable
from dataclasses import replace
from pkgutil import resolve_name
from typing import Any

from kvsearch.errors import KvsearchError, nearest, quoted
from kvsearch.exporters.fields import Verdict, verdicts
from kvsearch.exporters.project import project, proof_of
from kvsearch.exporters.target import PROOFS, Artefact, Job, Proof, Target, unknown_options
from kvsearch.extensions import extend

__all__ = [
    "OTHERS",
    "PROOFS",
    "TARGETS",
    "Artefact",
    "Job",
    "Proof",
    "Target",
    "Verdict",
    "artefact",
    "find",
    "project",
    "proof_of",
    "verdicts",
]

POLICY = "policy.json"  # beside which other files of the policy lie

TARGETS: dict[str, str] = {
    "transformers": "kvsearch.exporters.transformers:TARGET",
    "llamacpp": "kvsearch.exporters.llamacpp:TARGET",
    "vllm": "kvsearch.exporters.vllm:TARGET",
    "sglang": "kvsearch.exporters.config_only:SGLANG",
    "tensorrt_llm": "kvsearch.exporters.config_only:TENSORRT_LLM",
    "openvino": "kvsearch.exporters.openvino:TARGET",
    "onnxruntime_genai": "kvsearch.exporters.config_only:ONNXRUNTIME_GENAI",
    "executorch": "kvsearch.exporters.config_only:EXECUTORCH",
    "mlx": "kvsearch.exporters.config_only:MLX",
    "ollama": "kvsearch.exporters.config_only:OLLAMA",
    "ik_llama": "kvsearch.exporters.by_layer:IK_LLAMA",
    "modelopt": "kvsearch.exporters.by_layer:MODELOPT",
    "turbo_attn": "kvsearch.exporters.by_layer:TURBO_ATTN",
    "kvpress": "kvsearch.exporters.kvpress:TARGET",
}


def _wrong(name: str, target: Any) -> str | None:
    if not isinstance(target, Target):
        return "it is no Target of kvsearch.exporters"
    return None if target.name == name else f"the target calls itself {quoted(target.name)}"


extend(TARGETS, "targets", _wrong, by_name=True)

# what `kvsearch export --to` writes beside them, for no runtime
OTHERS: dict[str, str] = {
    "vectors": "a conformance kit: what a runtime must compute under the policy",
    "optuna": "the trials of a run folder, as an Optuna storage",
}


def find(name: str, beside: Iterable[str] = ()) -> Target:
    """The target called `name`.

    Args:
        name: of the target.
        beside: what else the caller would have taken; for the hint alone.

    Raises:
        KvsearchError: there is no such target; the nearest names are named.
    """
    if name not in TARGETS:
        raise KvsearchError(f"unknown target {quoted(name)}{nearest(name, [*TARGETS, *beside])}")
    target: Target = resolve_name(TARGETS[name])
    return target


def artefact(job: Job, target: Target) -> Artefact:
    """What `target` is given for a projected policy; every option of it is one of its version.

    Raises:
        PolicyError: weights that the policy's rule has learned are missing or damaged.
    """
    made = target.write(job)
    assert not (wrong := unknown_options(target, made.options)), (target.name, wrong)
    if job.policy.rule is None or POLICY not in made.files:
        return made
    from kvsearch.models.learned import beside  # loads torch

    return replace(made, files={**made.files, **beside(job.policy)})
