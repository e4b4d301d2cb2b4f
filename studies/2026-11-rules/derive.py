"""rules.csv from the documents in records/."""

import argparse
import csv
import io
import json
from pathlib import Path

HERE = Path(__file__).parent


def rows() -> list[dict[str, object]]:
    """One row per budget, text and policy, in the order of the records."""
    out = []
    for file in sorted(HERE.glob("records/*.json")):
        name, _, budget = file.stem.partition("-b")
        group, _, text = name.rpartition("-")
        document = json.loads(file.read_text(encoding="utf-8"))
        for r in sorted(document["results"], key=lambda r: r["nll"]):
            d = r["dnll_full"]
            out.append(
                {
                    "slots": int(budget),
                    "group": group or "rules",
                    "text": text,
                    "policy": r["policy"],
                    "n": document["tokens"],
                    "ppl": f"{r['ppl']:.3f}",
                    "dnll_full": f"{d['mean']:+.4f}",
                    "lo": f"{d['lo']:+.4f}",
                    "hi": f"{d['hi']:+.4f}",
                    "slots16": f"{r['slots16']:.1f}",
                }
            )
    return out


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--out", type=Path, default=HERE)
    found, text = rows(), io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(found[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(found)
    (ask.parse_args().out / "rules.csv").write_text(text.getvalue(), newline="\n")


if __name__ == "__main__":
    main()
