"""Collected only where TRITON_INTERPRET=1, which `test_lanes.py` sets in a process of its own."""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
