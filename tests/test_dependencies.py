"""What is imported is declared, and what is declared is imported."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from kvsearch.errors import KvsearchError
from kvsearch.policy_search import samplers

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
THROUGH_OTHERS = {"accelerate", "scipy"}  # transformers reads GGUF with one; Optuna's gp


def normal(name: str) -> str:
    """The name of a distribution as PyPI compares it, without versions, extras and markers."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\s\[<>=!~;]", name, maxsplit=1)[0]).lower()


def imported() -> Iterator[tuple[str, Path]]:
    """Top-level names from other projects, wherever in a file they are imported."""
    ours = {"kvsearch", "kvsearch_kernels"}
    for file in [*ROOT.glob("kvsearch/**/*.py"), *ROOT.glob("kernels/**/*.py")]:
        here = {f.stem for f in file.parent.glob("*.py")} if "bench" in file.parts else set()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                modules = [node.module or ""]
            for name in {m.partition(".")[0] for m in modules}:
                if name not in sys.stdlib_module_names | ours | here:
                    yield name, file


def test_imports_and_declared_dependencies_are_the_same() -> None:
    provides = packages_distributions()
    used = {normal(provides.get(name, [name])[0]) for name, _ in imported()}
    core = {normal(d) for d in PROJECT["dependencies"]}
    extras = PROJECT["optional-dependencies"]
    optional = {normal(d) for group in extras.values() for d in group}
    assert used - core - optional == set()
    lazy = {normal(d) for name in ("ray", "flash", "gp", "train", "vllm") for d in extras[name]}
    assert (core | lazy) - used == THROUGH_OTHERS


def test_the_sampler_gp_without_scipy_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samplers, "find_spec", lambda name: None)
    with pytest.raises(KvsearchError, match=r"needs SciPy: pip install 'kvsearch\[gp\]'"):
        samplers.check_name("gp")
    samplers.check_name("kvei")
