"""Losses of exported policies in kvpress, beside those that our evaluator predicts.

    kvsearch targets --install kvpress
    python measure.py --text wikitext2-test.raw               # the policies below
    python measure.py --text wikitext2-test.raw --only tova --stock

Each policy goes through `kvsearch export --to kvpress --verify`, whose document is kept with the
date and the versions in `records/`. `--stock` takes the presses as kvpress has them instead, whose
kept pairs are in order of score, and keeps its losses in `stock/`.
"""

import argparse
import datetime
import json
import os
import platform
import re
import tempfile
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kvsearch.commands.export import export
from kvsearch.exporters import Artefact, find, proof
from kvsearch.exporters.environments import installed
from kvsearch.files import write_atomic
from kvsearch.models.load import load_model
from kvsearch.policy import Policy

HERE = Path(__file__).parent
WINDOWS, CONTEXT, PROMPT = 4, 321, 192
SIZES = {"slots": 168, "interval": 40}  # 128 tokens are left by each compaction
RULES: dict[str, dict[str, Any]] = {
    "streamingllm": {"sinks": 4},
    "key-norm": {"rule": {"name": "key-norm"}},
    "keydiff": {"rule": {"name": "keydiff"}},
    "lagkv": {"rule": {"name": "lagkv", "lag": 32}, "sinks": 4},
    "snapkv": {"rule": {"name": "attention", "horizon": 32, "pool": 5}, "recent_window": 32},
    "tova": {"rule": {"name": "attention", "horizon": 1, "share": "layer"}, "recent_window": 1},
}
POLICIES: dict[str, dict[str, Any]] = {
    **{n: SIZES | r | {"trigger": "prompt+stream"} for n, r in RULES.items()},
    **{f"{n}-prompt": SIZES | r | {"trigger": "prompt"} for n, r in RULES.items()},
}


def as_it_comes(made: Artefact) -> Artefact:
    """The artefact with kvpress's own `compress`."""
    text, count = re.subn(
        r"\n    def compress\(.*?(?=\n\n\n)", "", made.files["run.py"], flags=re.S
    )
    assert count == 1
    return replace(made, files={**made.files, "run.py": text})


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--text", required=True)
    ask.add_argument("--only", choices=list(POLICIES), action="append")
    ask.add_argument("--stock", action="store_true")
    o = ask.parse_args()
    loaded = load_model("smollm2-135m")
    if o.stock:
        right = proof.score
        proof.score = lambda t, made, *rest: right(t, as_it_comes(made), *rest)
    for name in o.only or POLICIES:
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as place:
            done = export(
                Policy.build(POLICIES[name]), "kvpress", place, model=loaded, text=o.text,
                context=CONTEXT, windows=WINDOWS, prompt=PROMPT, verify=True, strict=True,
            )  # fmt: skip
        document = done.document()
        record = {
            "name": name,
            "date": datetime.date.today().isoformat(),
            "seconds": round(time.perf_counter() - start, 1),
            "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}",
            "versions": {
                "kvpress": installed(find("kvpress")),
                "python": platform.python_version(),
                **{n: version(n) for n in ("torch", "transformers", "numpy")},
            },
            "model": "smollm2-135m, weights in fp32",
            "windows": {"count": WINDOWS, "tokens": CONTEXT, "prompt": PROMPT},
            **{k: document[k] for k in ("target", "version", "policy", "tokens")},
            **{k: document[k] for k in ("bytes_peak", "loss", "measured")},
        }
        folder = HERE / ("stock" if o.stock else "records")
        write_atomic(folder / f"{name}.json", json.dumps(record, indent=1) + "\n")
        print(name, record["loss"], record["seconds"], flush=True)


if __name__ == "__main__":
    main()
