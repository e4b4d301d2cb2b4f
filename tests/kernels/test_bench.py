import os
import subprocess
import sys
from pathlib import Path

RUN = Path(__file__).parents[2] / "kernels/bench/run.py"


def test_the_dry_run_builds_every_case_and_writes_nothing(tmp_path):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, str(RUN), "--dry-run", "--out", str(tmp_path / "rows.csv")],
        env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "nothing was timed" in run.stdout
    assert not list(tmp_path.iterdir())
