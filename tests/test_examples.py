"""The examples in the documentation run as they are printed."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "docs" / "examples"
SAYS = {"search": "SearchResult", "generate": "full cache: ", "own_rule": "value-norm"}


@pytest.mark.parametrize("name", sorted(f.stem for f in EXAMPLES.glob("*.py") if f.stem != "tiny"))
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), "--smoke"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert SAYS[name] in done.stdout and not list(tmp_path.iterdir())
