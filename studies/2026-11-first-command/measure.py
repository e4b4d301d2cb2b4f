"""The first command on six texts: `kvsearch run --budget 256`, with nothing but `--text`.

    python studies/2026-11-first-command/measure.py --wikitext FILE --sotu FILE

Three parts of WikiText-2, two of sotu, and the built-in text, one after the other; `--only NAME`
for some of them. What the tables need of each run is kept in `records/NAME`. Runs are made in
`--runs`, where one that is interrupted continues.
"""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

from kvsearch.results.folder import RunFolder

HERE = Path(__file__).parent
KEPT = ("study.json", "measured.json", "frozen.json", "trials.jsonl", "blocks.parquet")


def texts(wikitext: Path, sotu: Path) -> dict[str, list[str]]:
    """Name -> options of the plain command that give the text."""
    parts = {
        "wikitext-1": f"{wikitext}:0-430000",
        "wikitext-2": f"{wikitext}:430000-860000",
        "wikitext-3": f"{wikitext}:860000-",
        "sotu-1": f"{sotu}:0-1500000",
        "sotu-2": f"{sotu}:1500000-",
    }
    return {"built-in": [], **{name: ["--text", part] for name, part in parts.items()}}


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--wikitext", type=Path, required=True)
    ask.add_argument("--sotu", type=Path, required=True)
    ask.add_argument("--runs", type=Path, default=Path("first-command"))
    ask.add_argument("--only", nargs="*", default=[])
    o = ask.parse_args()
    for name, options in texts(o.wikitext, o.sotu).items():
        if o.only and name not in o.only:
            continue
        run, kept = o.runs / name, HERE / "records" / name
        command = [sys.executable, "-m", "kvsearch", "run", "--budget", "256", "--out", str(run)]
        subprocess.run([*command, *options], check=True)
        keep(run, kept)


def keep(run: Path, kept: Path) -> None:
    """Copy what the tables need, losses as sums over blocks of tokens."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    copy = shutil.copytree(run, kept.with_name(f"{kept.name}.part"), dirs_exist_ok=True)
    start = json.loads((copy / "study.json").read_text())["settings"]["score_from"] - 1
    RunFolder(copy, write=False).shrink(start)
    asked = json.loads((copy / "study.json").read_text())
    given = asked.get("options", {})  # without the folders of this machine
    given |= {"out": Path(given.get("out", run)).name}
    given |= {"text": [Path(text).name for text in given.get("text", [])]}
    (copy / "study.json").write_text(json.dumps(asked, indent=2) + "\n", newline="\n")
    kept.mkdir(exist_ok=True)
    for name in KEPT:
        shutil.move(copy / name, kept / name)
    shutil.rmtree(copy)


if __name__ == "__main__":
    main()
