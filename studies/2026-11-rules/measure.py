"""Measure the five rules beside H2O and a window: two budgets, two report texts.

    python studies/2026-11-rules/measure.py --wikitext wikitext2-test.raw --sotu sotu.txt

Writes one document of `kvsearch eval` per budget and text into records/; what is there stays.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
METHODS = (
    "streamingllm", "h2o", "value-attention", "key-norm", "keydiff", "expected-attention",
    "expected-attention-mean",
)  # fmt: skip
PARTS = {"wikitext": "900000-1290547", "sotu": "1500000-3028007"}  # bytes of the report texts


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    for name in PARTS:
        ask.add_argument(f"--{name}", type=Path, required=True)
    ask.add_argument("--budgets", type=int, nargs="+", default=[128, 256])
    files = vars(ask.parse_args())
    for budget in files["budgets"]:
        for name, part in PARTS.items():
            out = HERE / "records" / f"{name}-b{budget}.json"
            if out.exists():
                continue
            # at 128 slots the covariance of the queries alone is larger than three quarters of it
            names = [m for m in METHODS if m != "expected-attention" or budget >= 256]
            command = [
                sys.executable, "-m", "kvsearch", "eval", *names, "--budget", str(budget),
                "--text", f"{files[name]}:{part}", "--context", "4096", "--windows", "2", "--json",
            ]  # fmt: skip
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                sys.exit(done.stderr.strip().splitlines()[-1])
            document = json.loads(done.stdout)
            out.write_text(json.dumps(document, indent=1) + "\n", newline="\n")


if __name__ == "__main__":
    main()
