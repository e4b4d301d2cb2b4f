"""Policies for other people's runtimes. One file a target, one line in `TARGETS`."""

from collections.abc import Iterable
from dataclasses import replace
from importlib import import_module

from kvsearch.errors import KvsearchError, nearest, quoted
from kvsearch.exporters.fields import Verdict, verdicts
from kvsearch.exporters.project import project, proof_of
from kvsearch.exporters.target import PROOFS, Artefact, Job, Proof, Target, unknown_options

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
    "transformers": "kvsearch.exporters.transformers",
    "llamacpp": "kvsearch.exporters.llamacpp",
    "vllm": "kvsearch.exporters.vllm",
    "sglang": "kvsearch.exporters.sglang",
    "tensorrt_llm": "kvsearch.exporters.tensorrt_llm",
    "openvino": "kvsearch.exporters.openvino",
    "onnxruntime_genai": "kvsearch.exporters.onnxruntime_genai",
    "executorch": "kvsearch.exporters.executorch",
    "mlx": "kvsearch.exporters.mlx",
    "ollama": "kvsearch.exporters.ollama",
    "kvpress": "kvsearch.exporters.kvpress",
}

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
    target: Target = import_module(TARGETS[name]).TARGET
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
