"""The first command on the six texts of `studies/2026-11-first-command`, as it is now.

    python measure.py --wikitext FILE --sotu FILE
    python measure.py --wikitext FILE --sotu FILE --only wikitext-1 --budget 128    # for docs/zoo

Runs are made in `--runs`, where one that is interrupted continues; what the tables need of each is
kept in `records/NAME`, of another budget in `zoo/bN`.
"""

import argparse
import importlib.util
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
_found = importlib.util.spec_from_file_location(
    "first_command", HERE.parent / "2026-11-first-command" / "measure.py"
)
assert _found is not None and _found.loader is not None
first_command = importlib.util.module_from_spec(_found)
_found.loader.exec_module(first_command)


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--wikitext", type=Path, required=True)
    ask.add_argument("--sotu", type=Path, required=True)
    ask.add_argument("--runs", type=Path, default=Path("first-answer"))
    ask.add_argument("--only", nargs="*", default=[])
    ask.add_argument("--budget", type=int, default=256)
    o = ask.parse_args()
    for name, options in first_command.texts(o.wikitext, o.sotu).items():
        if not o.only or name in o.only:
            kept = HERE / "records" / name if o.budget == 256 else HERE / "zoo" / f"b{o.budget}"
            run = o.runs / f"{name}-b{o.budget}"
            command = [sys.executable, "-m", "kvsearch", "run", "--budget", str(o.budget)]
            subprocess.run([*command, "--out", str(run), *options], check=True)
            first_command.keep(run, kept)


if __name__ == "__main__":
    main()
