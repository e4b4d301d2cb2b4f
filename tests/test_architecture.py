"""The house: floors, light imports, no shadowing, what ships."""

import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parent.parent


def fresh(code: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter."""
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=120
    )


def test_floors() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([str(lint)], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout


def test_no_module_imports_itself_in_a_circle() -> None:
    """Imports for type checkers and inside functions count."""
    packages = ("kvsearch", "kvsearch_kernels")
    graph = grimp.build_graph(*packages, exclude_type_checking_imports=False, cache_dir=None)
    needs = {m: graph.find_modules_directly_imported_by(m) for m in graph.modules}
    assert len(needs) > 150
    TopologicalSorter(needs).prepare()  # raises CycleError, which names the circle


# What is imported next has not imported what is named behind it; each may import more than before.
LIGHT = (
    ("kvsearch", "torch transformers optuna numpy pydantic"),
    ("kvsearch.policy", "torch transformers optuna"),
    ("kvsearch.rules", "torch transformers optuna"),
    ("kvsearch.policy_space", "torch transformers optuna"),
    ("kvsearch.results.records", "torch transformers optuna"),
    ("kvsearch.workloads.text", "torch transformers datasets"),
    ("kvsearch.options.other_commands", "torch transformers optuna"),
    ("kvsearch.cli", "torch transformers optuna matplotlib"),
    ("kvsearch.report", "torch transformers matplotlib jinja2"),
    ("kvsearch_kernels", "torch triton"),
    ("kvsearch_kernels.lifetime_attention", "triton transformers"),
)


def test_imports_are_light() -> None:
    done = fresh(
        "import importlib, sys\n"
        f"for module, heavy in {LIGHT!r}:\n"
        "    importlib.import_module(module)\n"
        "    assert not {*heavy.split()} & {*sys.modules}, (module, heavy)\n"
    )
    assert done.returncode == 0, done.stderr


def test_importing_shadows_nothing_and_changes_nothing_in_transformers() -> None:
    """Nor asks for a GPU or the network. transformers looks for a package named `kernels`."""
    done = fresh(
        "import socket, torch; socket.socket = torch.cuda.is_available = None;"
        "import importlib.util as u; s = u.find_spec('kernels');"
        "print(s is None or s.origin is None or 'site-packages' in s.origin);"
        "from transformers.utils.import_utils import is_kernels_available as k;"
        "print(k() in (0, 1));"
        "from transformers import AttentionInterface as A; before = set(A());"
        "import kvsearch.cache.huggingface, kvsearch.evaluation.evaluator, kvsearch.workloads.text;"
        "print(set(A()) == before)"
    )
    assert done.stdout.split() == ["True"] * 3, done.stderr


def test_no_test_is_skipped_where_a_module_of_ours_is_missing() -> None:
    skips = re.compile(r"importorskip\(\s*[\"']kvsearch")
    found = [f.name for f in (ROOT / "tests").rglob("*.py") if skips.search(f.read_text())]
    assert not found


def test_only_two_files_import_the_cache_interface() -> None:
    users = [
        str(f.relative_to(ROOT))
        for f in (ROOT / "kvsearch").rglob("*.py")
        if "transformers.cache_utils" in f.read_text()
    ]
    assert sorted(users) == ["kvsearch/cache/huggingface.py", "kvsearch/cache/hybrid.py"]


def test_files_are_small() -> None:
    sizes = sorted(
        len(f.read_text().splitlines())
        for f in (ROOT / "kvsearch").rglob("*.py")
        if f.name != "__init__.py"
    )
    assert sizes[-1] <= 500
    assert sizes[len(sizes) // 2] <= 150


# Under 40 lines: a command's options, what one line of a table leads to, or a few constants.
SHORT = ("cli/", "options/", "policy_search/samplers/", "workloads/tasks/", "serving/accepts.py",
         "serving/vllm/names.py", "models/sample.py", "session/head_losses.py",
         "session/learned.py")  # fmt: skip


def test_what_stands_alone_is_an_idea() -> None:
    package = ROOT / "kvsearch"
    found = [
        str(f.relative_to(package))
        for f in package.rglob("*.py")
        if not f.name.startswith("__") and len(f.read_text().splitlines()) < 40
    ]
    assert not [f for f in found if not f.startswith(SHORT)]
