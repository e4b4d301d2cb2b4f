"""vllm.csv from the records, and rounding.csv from rounding.json."""

import argparse
import csv
import io
import json
import statistics
from pathlib import Path

HERE = Path(__file__).parent


def rows() -> list[dict[str, object]]:
    """One row per policy and version of vLLM; differences in nats, with their 95 % intervals."""
    out = []
    for file in sorted(HERE.glob("records/*/*.json")):
        r = json.loads(file.read_text(encoding="utf-8"))
        loss, other = r["loss"], r.get("in_pieces", {})
        out.append(
            {
                "policy": r["name"],
                "losses_of": r.get("losses_of", "prompts"),
                "n": loss["tokens"],
                "nll_ours": f"{loss['given']:.5f}",
                "nll_vllm": f"{loss['runtime']:.5f}",
                "off_nats": f"{loss['off']['mean']:+.5f}",
                "agrees": loss["agrees"],
                "lo": f"{loss['off']['lo']:+.5f}",
                "hi": f"{loss['off']['hi']:+.5f}",
                "largest": f"{loss['largest']:.4f}",
                "off_in_pieces": f"{other['mean']:+.5f}" if other else "",
                "largest_in_pieces": f"{other['largest']:.4f}" if other else "",
                "same_tokens": r["same_tokens"],
                "preemptions": r["preemptions"],
                # of a stream: a prompt has one of its own
                "bytes_peak": ""
                if "losses_of" in r and r["losses_of"] != "prompts"
                else r["bytes_peak"],
                "bytes_held": " ".join(map(str, r.get("bytes_held", []))),
                "bytes_ours": " ".join(map(str, r["bytes_ours"])),
                "blocks": r["blocks"],
                "requests_at_once": f"{r['concurrency']:.2f}",
                "date": r["date"],
                "vllm": r["version"],
            }
        )
    return out


def rounding() -> list[dict[str, object]]:
    """One row per policy: losses with other last bits less those without, in nats."""
    r = json.loads((HERE / "rounding.json").read_text(encoding="utf-8"))
    out: list[dict[str, object]] = []
    for name, draws in r["off"].items():
        means = [d["mean"] for d in draws]
        out.append(
            {
                "policy": name,
                "n": r["tokens"],
                "draws": len(means),
                "off_nats": f"{statistics.mean(means):+.5f}",
                "sd": f"{statistics.stdev(means):.5f}",
                "least": f"{min(means):+.5f}",
                "most": f"{max(means):+.5f}",
                "each_token": f"{statistics.mean(d['each'] for d in draws):.4f}",
            }
        )
    return out


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--out", type=Path, default=HERE)
    out = ask.parse_args().out
    for name, found in (("vllm.csv", rows()), ("rounding.csv", rounding())):
        text = io.StringIO()
        writer = csv.DictWriter(text, fieldnames=list(found[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)
        (out / name).write_text(text.getvalue(), newline="\n")


if __name__ == "__main__":
    main()
