"""Measure four rules beside H2O and a window, and KIVI's format beside int4: two report texts.

    python studies/2026-11-rules/measure.py --wikitext wikitext2-test.raw --sotu sotu.txt

Writes one document of `kvsearch eval` per budget and text into records/, unless it exists.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from kvsearch.policy import ModelShape
from kvsearch.policy_space import Setting, Value, build

HERE = Path(__file__).parent
METHODS = ("streamingllm", "h2o", "value-attention", "key-norm", "keydiff")
EXPECTED = ("expected-attention-mean", "expected-attention")
SHAPE = ModelShape(layers=30, kv_heads=3, head_dim=64, heads=9)  # SmolLM2-135M
WINDOW: dict[str, Value] = dict(interval=32, sinks=0, recent_window=32, group=32)
FORMATS: dict[str, dict[str, Value]] = {  # a window at the budget, by age
    f"window k{k}v{v} along {along}": {
        **WINDOW, "tiers": f"k{k}v{v}", "along": along, "fp16_recent": True
    }
    for k, v in ((4, 4), (2, 2))
    for along in ("channels", "tokens")
}  # fmt: skip
WHOLE = ("int4", "kivi4", "int2", "kivi2")  # nothing evicted
PARTS = {"wikitext": "900000-1290547", "sotu": "1500000-3028007"}  # bytes of the report texts


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    for name in PARTS:
        ask.add_argument(f"--{name}", type=Path, required=True)
    ask.add_argument("--budgets", type=int, nargs="+", default=[128, 256])
    files = vars(ask.parse_args())
    for budget in files["budgets"]:
        for name, part in PARTS.items():
            text = f"{files[name]}:{part}"
            measure([*METHODS], budget, text, HERE / "records" / f"{name}-b{budget}.json")
            # at 128 slots the covariance of the queries is more than three quarters of the memory
            expected = [*EXPECTED[: 1 if budget < 256 else 2]]
            measure(expected, budget, text, HERE / "records" / f"expected-{name}-b{budget}.json")
            with tempfile.TemporaryDirectory() as place:
                formats = [*WHOLE]
                setting = Setting(SHAPE, SHAPE.budget_bytes(budget), 4096)
                for i, (label, knobs) in enumerate(FORMATS.items()):
                    file = Path(place) / f"{i}.json"
                    file.write_text(build(knobs, setting, label).to_json(), encoding="utf-8")
                    formats.append(str(file))
                out = HERE / "records" / f"formats-{name}-b{budget}.json"
                measure(formats, budget, text, out)


def measure(policies: list[str], budget: int, text: str, out: Path) -> None:
    """Write the document of `kvsearch eval` to `out`, unless it exists."""
    if out.exists():
        return
    command = [
        sys.executable, "-m", "kvsearch", "eval", *policies, "--budget", str(budget),
        "--text", text,
        "--context", "4096", "--windows", "2", "--json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr.strip().splitlines()[-1])
    document = json.loads(done.stdout)
    document["tokens"] = document["workloads"][0]["scored"]
    out.write_text(json.dumps(document, indent=1) + "\n", newline="\n")


if __name__ == "__main__":
    main()
