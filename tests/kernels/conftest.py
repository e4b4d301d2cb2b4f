"""Lanes: torch, Triton's interpreter (its own process), compiled for sm_90 and carried out."""

import sys
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
if find_spec("kvsearch_kernels") is None:
    sys.path.insert(0, str(HERE.parents[1] / "kernels"))
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))
