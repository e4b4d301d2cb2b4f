import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
KERNELS = HERE.parents[1] / "kernels"


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this is that lane")
@pytest.mark.slow
def test_the_kernels_agree_with_their_references_in_the_interpreter():
    # Triton reads the variable when it decorates a kernel, hence a process of its own
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-n0",
            "-p",
            "no:cacheprovider",
            str(HERE / "interpreter"),
        ],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]


def test_importing_all_but_kernels_and_loops_imports_neither_triton_nor_numba():
    code = (
        "import sys, pkgutil, importlib, kvsearch_kernels as p\n"
        "for m in pkgutil.walk_packages(p.__path__, p.__name__ + '.'):\n"
        "    if m.name.endswith('kernels') or '.numba_loops.' in m.name: continue\n"
        "    importlib.import_module(m.name)\n"
        "assert 'kvsearch_kernels.lifetime_attention.triton_impl' in sys.modules\n"
        "assert not {'triton', 'numba'} & {*sys.modules}\n"
    )
    path = os.pathsep.join([str(KERNELS), os.environ.get("PYTHONPATH", "")])
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, check=True)
