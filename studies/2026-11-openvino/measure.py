"""Losses of exported policies in OpenVINO GenAI, beside those that our evaluator predicts.

    kvsearch targets --install openvino
    python measure.py --text wikitext2-test.raw:0-600000

Each policy goes through `kvsearch export --to openvino --verify`, whose document is kept with
the date and the versions in `records/`.
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
CONTEXT = 1024  # tokens
POLICIES: dict[str, dict[str, Any]] = {
    "f16": {},
    **{
        f"u{k}-u{v}-group-{group or 'head'}": {
            "tiers": [{"key_bits": k, "value_bits": v}],
            "quantizer": {"group": group},
        }
        for k, v, group in ((8, 8, None), (8, 4, None), (4, 4, None), (8, 4, 32), (4, 4, 32))
    },
    "sum": {
        **{"slots": 256, "interval": 32, "sinks": 32, "recent_window": 64},
        **{"trigger": "prompt+stream", "rule": {"name": "attention", "share": "layer"}},
    },
}
PROMPT = 512  # where a prompt triggers eviction; its tokens are not scored


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--text", required=True)
    ask.add_argument("--only", choices=list(POLICIES), action="append")
    o = ask.parse_args()
    made = {n: Policy.build(POLICIES[n]) for n in o.only or POLICIES}
    for name, policy in made.items():
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as place:
            done = export(
                policy,
                "openvino",
                place,
                text=o.text,
                context=CONTEXT,
                verify=True,
                strict=True,
                prompt=PROMPT if policy.after_prompt else 0,
            )
        document = done.document()
        record = {
            "name": name,
            "date": datetime.date.today().isoformat(),
            "seconds": round(time.perf_counter() - start, 1),
            "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}",
            "versions": {
                "openvino-genai": installed(find("openvino")),
                "python": platform.python_version(),
                **{n: version(n) for n in ("torch", "transformers", "numpy")},
            },
            "model": "smollm2-135m, weights in fp16 there, fp32 here",
            **{k: document[k] for k in ("target", "version", "policy", "tokens")},
            **{k: document[k] for k in ("bytes_peak", "loss", "measured")},
        }
        write_atomic(HERE / "records" / f"{name}.json", json.dumps(record, indent=1) + "\n")
        print(name, record["loss"], record["seconds"], flush=True)


if __name__ == "__main__":
    main()
