"""openvino.csv from the records."""

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
    for file in sorted(HERE.glob("records/*.json")):
        r = json.loads(file.read_text(encoding="utf-8"))
        loss, held = r["loss"], r["measured"]
        told = loss["runtime"] is not None
        off = {k: loss["off"][k] for k in ("lo", "hi")} if told else {}
        percent = {k: f"{100 * expm1(x):+.3f}" for k, x in off.items()}
        out.append(
            {
                "policy": r["name"],
                "n": loss["tokens"],
                "ppl_predicted": f"{exp(loss['given']):.4f}",
                "ppl_openvino": f"{exp(loss['runtime']):.4f}" if told else "",
                "off_percent": f"{100 * expm1(loss['runtime'] - loss['given']):+.3f}"
                if told
                else "",
                "lo": percent.get("lo", ""),
                "hi": percent.get("hi", ""),
                "agrees": loss["agrees"] if told else "",
                "generated": held.get("generated", ""),
                "bytes_policy": r["bytes_peak"]["given"],
                "cache_bytes": held["cache_bytes"],
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
    (ask.parse_args().out / "openvino.csv").write_text(text.getvalue(), newline="\n")


if __name__ == "__main__":
    main()
