"""What all parts of this study share: texts, windows, records. Models are in bfloat16."""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvsearch.evaluation.evaluator import Evaluator
from kvsearch.models import load_model
from kvsearch.models.load import LoadedModel
from kvsearch.policy import Policy, layout
from kvsearch.results.measurement import Measurement
from kvsearch.workloads.text import read_file, tokenize, windows

HERE = Path(__file__).parent
DTYPE = "bfloat16"
FULL = Policy(name="full")
REPORT = {"wikitext": "900000-1290547", "sotu": "1500000-3028007"}  # bytes of each text


def options(what: str | None) -> argparse.ArgumentParser:
    """Of every script."""
    torch.set_num_threads(1)
    ask = argparse.ArgumentParser(description=what)
    for text in REPORT:
        ask.add_argument(f"--{text}", type=Path, required=True)
    ask.add_argument("--work", type=Path, required=True, help="folder for trained models")
    return ask


def loaded(model: str | Path = "smollm2-135m", dtype: str = DTYPE) -> LoadedModel:
    """A model by name or folder."""
    return load_model(str(model), dtype=dtype)


def cut(on: LoadedModel, file: Path, part: str, count: int, length: int) -> np.ndarray:
    """Token windows `[W, T]` of a range of bytes."""
    return windows(tokenize(on.tokenizer, read_file(f"{file}:{part}")), count=count, length=length)


def keep(part: str, name: str, row: Any) -> None:
    """Write a row of records/PART.json."""
    file = HERE / "records" / f"{part}.json"
    rows = {**kept(part), name: row}
    lines = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in rows.items())
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"{{\n{lines}\n}}\n", newline="\n")
    print(part, name, json.dumps(row)[:160], flush=True)


def kept(part: str) -> dict[str, Any]:
    """Rows of records/PART.json by name."""
    file = HERE / "records" / f"{part}.json"
    return json.loads(file.read_text()) if file.exists() else {}


def measured(on: LoadedModel, policy: Policy, ids: np.ndarray, batch: int = 1) -> dict[str, Any]:
    """A policy on windows of one text: NLL summed over each, and exact bytes per sequence."""
    found = Evaluator(on, batch=batch).quality(policy, ids, resident=False)
    mean, peak = held(on, policy, found, ids.shape[1])
    return {
        "sums": [round(float(x), 3) for x in found.nll.astype(np.float64).sum(1)],
        "tokens": found.nll.shape[1],
        "bytes_mean": round(mean),
        "bytes_peak": peak,
    }


def held(on: LoadedModel, policy: Policy, found: Measurement, tokens: int) -> tuple[float, int]:
    """Bytes of keys and values over a window: mean over its steps, and the most at any."""
    if found.anchored is not None:
        return found.anchored.bytes.mean, found.anchored.bytes.peak
    sizes = layout(policy, on.shape)
    return sizes.bytes_mean(tokens), sizes.bytes_peak(tokens)
