"""Not collected under the interpreter, whose kernels cannot be compiled."""

import os

collect_ignore_glob = ["test_*.py"] if os.environ.get("TRITON_INTERPRET") == "1" else []
