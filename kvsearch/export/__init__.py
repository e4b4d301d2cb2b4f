"""Policies for other people's runtimes. One file a target, one line here."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from kvsearch.errors import KvsearchError, nearest
from kvsearch.policy import Policy

TARGETS: dict[str, str] = {"transformers": "kvsearch.export.transformers"}


def export(policy: Policy, target: str, folder: Path) -> list[Path]:
    """Write what `target` needs to run `policy` into `folder`; returns the files written."""
    if target not in TARGETS:
        raise KvsearchError(f"unknown target {target!r}{nearest(target, TARGETS)}")
    write: Callable[[Policy, Path], list[Path]] = import_module(TARGETS[target]).write
    return write(policy, folder)
