"""Losses of exported policies in llama-cpp-python, beside those that our evaluator predicts.

    kvsearch targets --install llamacpp
    python measure.py --text wikitext2-test.raw:0-600000               # the policies below
    python measure.py --text wikitext2-test.raw:0-600000 --policy found.json --name found

Each policy goes through `kvsearch export --to llamacpp --verify`, whose document is kept with
the date and the versions in `records/`. The searched policy is of the run in the README.
"""

import argparse
import datetime
import json
import os
import platform
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kvsearch.commands.export import export
from kvsearch.exporters import find
from kvsearch.exporters.environments import installed
from kvsearch.files import write_atomic
from kvsearch.policy import Policy

HERE = Path(__file__).parent
CONTEXT = 4608  # tokens; the window's 256 come before the first that is scored
TIERS = {"tiers": [{"key_bits": 8, "value_bits": 4}]}
BLOCKS = {"group": 32, "levels": "ggml-0"}
WINDOW = {"slots": 256, "sinks": 4}
POLICIES: dict[str, dict[str, Any]] = {
    "f16": {},
    "q8_0-q4_0": TIERS | {"quantizer": BLOCKS | {"rotate": True}},
    "q8_0-q4_0-unrotated": TIERS | {"quantizer": BLOCKS},
    "window": WINDOW | {"interval": 16},
    "window-shifted": WINDOW | {"interval": 16, "positions": "cache"},
    "window-q8_0-q4_0": WINDOW | TIERS | {"quantizer": BLOCKS | {"rotate": True}},
}


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--text", required=True)
    ask.add_argument("--only", choices=list(POLICIES), action="append")
    ask.add_argument("--policy", type=Path, help="a policy file instead")
    ask.add_argument("--name", default="found", help="of its record")
    o = ask.parse_args()
    made = {n: Policy.build(POLICIES[n]) for n in o.only or POLICIES}
    if o.policy is not None:
        made = {o.name: Policy.from_json(o.policy)}
    for name, policy in made.items():
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as place:
            done = export(
                policy, "llamacpp", place, text=o.text, context=CONTEXT, verify=True, strict=True
            )
        document = done.document()
        record = {
            "name": name,
            "date": datetime.date.today().isoformat(),
            "seconds": round(time.perf_counter() - start, 1),
            "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}",
            "versions": {
                "llama-cpp-python": installed(find("llamacpp")),
                "python": platform.python_version(),
                **{n: version(n) for n in ("torch", "transformers", "numpy")},
            },
            "model": "smollm2-135m, weights in fp32",
            **{k: document[k] for k in ("target", "version", "policy", "tokens")},
            **{k: document[k] for k in ("bytes_peak", "loss", "measured")},
        }
        write_atomic(HERE / "records" / f"{name}.json", json.dumps(record, indent=1) + "\n")
        print(name, record["loss"], record["seconds"], flush=True)


if __name__ == "__main__":
    main()
