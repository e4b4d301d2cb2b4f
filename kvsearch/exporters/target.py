"""A target: a runtime, what it can execute, and how a policy is written for it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from shlex import quote
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvsearch.exporters.capability import Capability
from kvsearch.policy import ModelShape, Policy
from kvsearch.rules import Rule

if TYPE_CHECKING:
    from kvsearch.models.load import LoadedModel

Proof = Literal["nll", "runs", "schema"]
Words = tuple[Any, ...] | type  # the values of an option: some words, or any of a type

PROOFS: dict[Proof, str] = {
    "nll": "teacher-forced log-likelihood in the runtime agrees with our evaluator",
    "runs": "the runtime accepted the artefact and generated",
    "schema": "names and values checked against a committed table of that version; not run",
}


@dataclass(frozen=True)
class Job:
    """What is to be written.

    Attributes:
        policy: what the runtime really runs, see `project`.
        shape: of the model; None if it is not known.
        model: name of the model, or a placeholder.
    """

    policy: Policy
    shape: ModelShape | None
    model: str


@dataclass(frozen=True)
class Artefact:
    """What a runtime is given.

    Attributes:
        files: name -> content.
        options: the runtime's options that they set, and the values.
        notes: what no field of the policy says about them, one sentence each.
    """

    files: Mapping[str, str | bytes]
    options: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Scored:
    """Losses in a runtime.

    Attributes:
        nll: nats per token `[W, T - 1]`; None where the runtime only generated.
        measured: what the runtime says of its cache.
    """

    nll: NDArray[np.float64] | None
    measured: dict[str, int]


@dataclass(frozen=True)
class Environment:
    """How a runtime is installed on its own.

    Attributes:
        requirements: for pip.
        about: what that costs.
        options: of pip.
        variables: of the environment.
        weights: type of the weights that the runtime is given to be compared, in a GGUF file; or a
            `folder` that transformers reads.
        takes_prompt: whether its script takes `--prompt`, tokens that come in one call.
        unwanted: packages that come with those and break them: built for another torch.
        ours: whether the artefact imports this package.
    """

    requirements: tuple[str, ...]
    about: str
    options: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    weights: Literal["fp32", "fp16", "folder"] = "fp32"
    takes_prompt: bool = False
    unwanted: tuple[str, ...] = ()
    ours: bool = False


@dataclass(frozen=True)
class Target:
    """One runtime.

    Attributes:
        name: for `--to` and `--target`.
        runtime: name of the project.
        version: that the artefact speaks.
        knobs: what can be set there, for people.
        executes: what it can execute; None is every policy, but for the fields in `without`.
        own: of that, what its own cache types hold, where an artefact prefers them.
        options: its options and their values in that version.
        write: the artefact of a projected policy.
        without: fields that it runs at their defaults only.
        unread: what its attention layers do not see of what a rule may need.
        proof: how far an export is proven.
        notes: what a policy cannot say about it, one sentence each.
        distribution: Python package that says whether it is installed; None has none.
        environment: how it is installed to be run by `--verify` in a process of its own.
        prompts_only: whether its losses are those of a prompt alone, so that they prove nothing of
            a policy that waits for its end.
        score: runs an artefact in this process instead, on token windows `[W, T]` of which the
            first tokens, as many as the last argument says, come in one call. A target with
            neither is not run.
    """

    name: str
    runtime: str
    version: str
    knobs: str
    executes: Capability | None
    options: Mapping[str, Words]
    write: Callable[[Job], Artefact]
    without: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    own: Capability | None = None
    proof: Proof = "schema"
    notes: tuple[str, ...] = ()
    distribution: str | None = None
    environment: Environment | None = None
    prompts_only: bool = False
    score: "Callable[[Artefact, LoadedModel, NDArray[np.int64], int], Scored] | None" = None

    @property
    def runs(self) -> bool:
        """Whether `--verify` can run it."""
        return self.environment is not None or self.score is not None

    def sees(self, rule: Rule | None) -> bool:
        """Whether its attention layers see what `rule` reads."""
        return rule is None or rule.needs.isdisjoint(self.unread)


def unknown_options(target: Target, options: Mapping[str, Any]) -> list[str]:
    """Options, or values of them, that the runtime's table does not have; one phrase each."""
    out = []
    for name, value in options.items():
        known = target.options.get(name)
        if known is None:
            out.append(f"option {name}")
        elif isinstance(known, tuple):
            values = value if isinstance(value, list | tuple) else [value]
            out += [f"{name} {v!r}" for v in values if v not in known]
        elif not isinstance(value, known) or (known is int and isinstance(value, bool)):
            out.append(f"{name} {value!r}")
    return out


def serve(model: str, command: str) -> str:
    """A script that takes another model, and options of the server behind it.

    Args:
        model: served where no other is named.
        command: with `"$model"`, and the options that the policy needs.
    """
    return (
        "#!/bin/sh\n# serve.sh [MODEL [OPTION ...]]\n"
        f"model=${{1:-{quote(model)}}}\n[ $# -eq 0 ] || shift\n"
        f'exec {command} "$@"\n'
    )
