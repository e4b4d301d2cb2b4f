"""verdicts.csv from nll.jsonl: what `kvsearch verify` says of a server with any of the policies."""

import argparse
import csv
import io
import json
from pathlib import Path

import numpy as np
from measure import POLICIES

from kvsearch.commands.verify import changes, compared
from kvsearch.policy import ModelShape, Policy

HERE = Path(__file__).parent
SHAPE = ModelShape(layers=30, kv_heads=3, head_dim=64, heads=9)  # SmolLM2-135M
NAMES = {"policy": "active", "full": "full", None: "neither"}


def rows() -> list[dict[str, object]]:
    """A row for each policy that is predicted and each that is served, on weights of any kind."""
    lines = [json.loads(x) for x in (HERE / "nll.jsonl").read_text(encoding="utf-8").splitlines()]
    nll = {(x["weights"], x["policy"]): np.array(x["nll"]) for x in lines}
    out = list[dict[str, object]]()
    for name in POLICIES:
        if name == "full":
            continue
        policy = Policy.build(POLICIES[name])
        start = min(changes(policy, SHAPE))
        for (weights, served), there in nll.items():
            mine, full = nll["fp32", name], nll["fp32", "full"]
            found = compared((name, "", served, ""), there, mine, full, start, policy.quantizes)
            off = found.off_before
            out.append(
                {
                    "predicted": name,
                    "served": served,
                    "weights": weights,
                    "verdict": NAMES[found.follows],
                    "tokens": found.tokens,
                    "slope": f"{found.slope.mean:+.3f}",
                    "lo": f"{found.slope.lo:+.3f}",
                    "hi": f"{found.slope.hi:+.3f}",
                    "off_policy": f"{found.off_policy:.4f}",
                    "off_full": f"{found.off_full:.4f}",
                    "apart": f"{found.apart:.4f}",
                    "off_before": "" if off is None else f"{off:.4f}",
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
    (ask.parse_args().out / "verdicts.csv").write_text(text.getvalue(), newline="\n")


if __name__ == "__main__":
    main()
