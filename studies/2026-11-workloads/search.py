"""Searches whose recommended policies `measure.py` compares: on each task, and on a text.

    python studies/2026-11-workloads/search.py NAME ... [--part 8] [--once]

NAME is a task of `measure.py`, several joined by `+`, or `text`. Every search has the same bytes:
so many slots of a context of 640 tokens. With `--once` it does not begin with KVzip in our bits,
which reads a context twice.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from measure import HERE, KVZIP, TASKS, TOKENS


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("names", nargs="+", metavar="NAME")
    ask.add_argument("--part", type=int, default=8)
    ask.add_argument("--items", default="8")
    ask.add_argument("--trials", default="12")
    ask.add_argument("--once", action="store_true", help="without kvzip+k5v4")
    ask.add_argument("--runs", type=Path, default=Path("workloads"))
    o = ask.parse_args()
    for name in o.names:
        on = ["--context", str(TOKENS)]
        if name != "text":
            on = [x for task in name.split("+") for x in ("--task", TASKS[task])]
            on += ["--items", o.items]
        label = f"{name}-once-{o.part}" if o.once else f"{name}-{o.part}"
        run = o.runs / label
        command = [sys.executable, "-m", "kvsearch", "run", "--budget", str(TOKENS // o.part)]
        options = ["--trials", o.trials, "--no-bench", "--out", str(run)]
        options += ["--exclude-method", KVZIP] if o.once else []
        subprocess.run([*command, *options, *on], check=True)
        (HERE / "found").mkdir(exist_ok=True)
        shutil.copy(run / "best.json", HERE / "found" / f"{label}.json")


if __name__ == "__main__":
    main()
