"""The wheel, installed in a folder of its own, has all it needs: `pytest -n0 tests/wheel.py`.

Not part of the suite, because building it fetches the build backend; `.ci/run` calls it. What the
wheel depends on is taken from the environment that runs this.
"""

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = [
    "kvsearch/py.typed",
    "kvsearch/report/template.html.j2",
    "kvsearch_kernels/py.typed",
    *(f"kvsearch/_search_spaces/{f.name}" for f in (ROOT / "search_spaces").glob("*.yaml")),
]


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command as a user would who has no checkout on the path; returns what it prints."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from the checkout."""
    place = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", place, ROOT, cwd=place)
    return next(place.glob("kvsearch-*.whl"))


@pytest.fixture(scope="module")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the programs of a virtual environment are that has the wheel installed."""
    place = tmp_path_factory.mktemp("elsewhere")
    venv.create(place)
    paths = sysconfig.get_paths("venv", {"base": str(place), "platbase": str(place)})
    pip = (sys.executable, "-m", "pip", "--python", place, "install")
    run(*pip, "-q", "--no-deps", "--no-index", wheel, cwd=place)
    # A path in a .pth file: what is installed there is found, but not the checkout it may name.
    dependencies = sysconfig.get_paths()["purelib"]
    Path(paths["purelib"], "dependencies.pth").write_text(dependencies, encoding="utf-8")
    return Path(paths["scripts"])


def test_the_wheel_has_the_data_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as z:
        names = z.namelist()
    assert set(SHIPPED) <= set(names)
    assert any(n.endswith(".dist-info/licenses/LICENSE") for n in names)
    tops = {n.partition("/")[0] for n in names if ".dist-info/" not in n}
    assert tops == {"kvsearch", "kvsearch_kernels"}


def test_methods_and_a_search_run_without_the_checkout(
    programs: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    found = run(
        programs / "python", "-c", "import kvsearch; print(kvsearch.__file__)", cwd=tmp_path
    )
    assert Path(found.strip()).is_relative_to(programs.parent)
    assert "streamingllm" in run(programs / "kvsearch", "methods", cwd=tmp_path)
    text = tmp_path / "text.txt"
    text.write_text("The lighthouse keeper counts the ships that pass. " * 60, encoding="utf-8")
    run(
        *(programs / "kvsearch", "run", "--model", tiny_folder, "--text", text, "--budget", "48"),
        *("--context", "128", "--trials", "2", "--out", "run"),
        cwd=tmp_path,
    )
    for name in ("report.html", "pareto.html", "pareto.png", "front.csv", "best.json"):
        assert (tmp_path / "run" / name).stat().st_size
