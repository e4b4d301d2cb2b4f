"""kvpress.csv from the records."""

import argparse
import csv
import io
import json
from math import exp, expm1
from pathlib import Path

HERE = Path(__file__).parent


def rows() -> list[dict[str, object]]:
    """One row per policy; differences of PPL in percent, with their 95 % intervals."""
    out = []
    for folder, presses in (("records", "in order of time"), ("stock", "as they come")):
        for file in sorted(HERE.glob(f"{folder}/*.json")):
            r = json.loads(file.read_text(encoding="utf-8"))
            loss, windows = r["loss"], r["windows"]
            out.append(
                {
                    "policy": r["name"],
                    "presses": presses,
                    "n": loss["tokens"],
                    "windows": windows["count"],
                    "prompt": windows["prompt"],
                    "ppl_predicted": f"{exp(loss['given']):.4f}",
                    "ppl_kvpress": f"{exp(loss['runtime']):.4f}",
                    "off_percent": f"{100 * expm1(loss['runtime'] - loss['given']):+.4f}",
                    "lo": f"{100 * expm1(loss['off']['lo']):+.4f}",
                    "hi": f"{100 * expm1(loss['off']['hi']):+.4f}",
                    "agrees": loss["agrees"],
                    "date": r["date"],
                    "version": r["version"],
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
    (ask.parse_args().out / "kvpress.csv").write_text(text.getvalue(), newline="\n")


if __name__ == "__main__":
    main()
