"""What the command line sets for threads that wait is there before torch reads it."""

import os
import subprocess
import sys

import pytest

CODE = """
import contextlib, os, sys

class Watch:
    def find_spec(self, name, *_):
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"), file=sys.stderr)
            os._exit(0)

sys.meta_path.insert(0, Watch())
from kvsearch.cli import main
with contextlib.suppress(SystemExit):
    main(["methods"])
import torch
"""


@pytest.mark.parametrize(("given", "read"), [(None, "1000"), ("7", "7")])
def test_waiting_threads_are_told_before_torch_is_loaded(given: str | None, read: str) -> None:
    env = {k: v for k, v in os.environ.items() if k != "GOMP_SPINCOUNT"}
    env |= {} if given is None else {"GOMP_SPINCOUNT": given}
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=env, capture_output=True, text=True, check=True
    )
    assert done.stderr.split() == [read]
