"""The highest level of proof: the artefact itself, run in the runtime on given tokens.

A runtime that this package shares its environment with is run in this process (`Target.score`).
Of the others, the artefact has a `run.py` that takes `MODEL --score IDS --out FILE`, and writes the
loss of every token after the first; where the runtime tells no losses, it generates instead. A
script with `takes_prompt` takes `--prompt` too. The weights are in fp32, as our evaluator has them,
or in fp16, so that only the cache can differ.
"""

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsearch.errors import RunError
from kvsearch.exporters.environments import require
from kvsearch.exporters.target import Artefact, Scored, Target
from kvsearch.models.load import LoadedModel, folder_of, gguf_in

TOLERANCE = 0.003  # of PPL


def score(
    target: Target, made: Artefact, loaded: LoadedModel, ids: NDArray[np.int64], prompt: int
) -> Scored:
    """Losses of token windows `[W, T]` in the runtime, here or in its environment.

    Raises:
        RunError: the environment is not there, or the runtime failed.
        ModelError: the runtime reads only GGUF files, and the model is none.
    """
    if target.score is not None:
        return target.score(made, loaded, ids, prompt)
    return run(target, made, loaded.name, ids, prompt)


def run(
    target: Target, made: Artefact, model: str, ids: NDArray[np.int64], prompt: int = 0
) -> Scored:
    """Score token windows `[W, T]` with the artefact in the target's environment.

    Raises:
        RunError: the environment is not there, or the runtime failed.
        ModelError: the runtime cannot be given this model.
    """
    python = require(target)
    assert target.environment is not None
    kind = target.environment.weights
    weights = folder_of(model) if kind == "folder" else gguf_in(kind, model)
    extra = ["--prompt", str(max(1, prompt))] if target.environment.takes_prompt else []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for name, content in made.files.items():
            data = content.encode() if isinstance(content, str) else content
            (folder / name).write_bytes(data)
        (folder / "ids.json").write_bytes(json.dumps(ids.tolist()).encode())
        clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
        if target.environment.ours:
            clean["PYTHONPATH"] = str(ours(folder / "packages"))
        done = subprocess.run(
            [python, "run.py", str(weights), "--score", "ids.json", "--out", "nll.json",
             "--threads", str(max(1, (os.cpu_count() or 2) // 2)), *extra],
            cwd=folder, env=clean, capture_output=True, text=True, errors="replace",
        )  # fmt: skip
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise RunError(
                f"{target.runtime} {target.version} ended with code {done.returncode}: {last[:200]}"
            )
        found: dict[str, Any] = json.loads((folder / "nll.json").read_text(encoding="utf-8"))
    losses = found.pop("nll")
    if losses is None:
        return Scored(None, found)
    nll = np.array(losses, dtype=np.float64)
    assert nll.shape == (ids.shape[0], ids.shape[1] - 1), nll.shape
    return Scored(nll, found)


def ours(place: Path) -> Path:
    """A folder with this package and its kernels, and nothing else that lies beside them."""
    import kvsearch_kernels

    place.mkdir()
    for source in (Path(__file__).resolve().parents[1], Path(kvsearch_kernels.__path__[0])):
        (place / source.name).symlink_to(source, target_is_directory=True)
    return place
