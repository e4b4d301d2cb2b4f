"""Tests that run on a GPU; where there is none, nothing is collected."""

import torch

collect_ignore_glob = (
    [] if torch.cuda.is_available() or __import__("os").environ.get("PRETEND") else ["test_*.py"]
)
