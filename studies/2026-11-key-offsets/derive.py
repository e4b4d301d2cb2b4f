"""energy.csv, losses.csv and points.csv from records/."""

import argparse
import csv
import io
import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
WAYS = {
    "full": "16 bits",
    "as they are": "as they are",
    "after": "vector",
    "balanced": "scales",
    "after, balanced": "vector and scales",
    "before": "mean turned by position",
}


def records(pattern: str) -> list[dict[str, Any]]:
    """Rows of the record files, in order."""
    files = sorted(HERE.glob(f"records/{pattern}.jsonl"))
    rows = [json.loads(x) for f in files for x in f.read_text("utf-8").splitlines()]
    return [r | {"model": r["model"].removesuffix(f"-{r['tokens']}")} for r in rows]


def energy(rows: list[dict[str, Any]]) -> list[dict[str, object]]:
    """What means hold of the keys of each layer, and what offsets leave."""
    return [
        {
            "model": r["model"],
            "tokens": r["tokens"],
            "layer": r["layer"],
            "largest": f"{r['largest']:.1f}",
            **{k: f"{r[k]:.3f}" for k in ("mean_after", "mean_before")},
            **{k: f"{r[k]:.4f}" for k in ("left_after", "left_before", "left_of 640")},
        }
        for r in rows
        if r["kind"] == "energy"
    ]


def losses(rows: list[dict[str, Any]]) -> list[dict[str, object]]:
    """Rise over 16 bits, the mean over contexts; only of contexts that have it."""
    found = [r for r in rows if r["kind"] == "loss"]
    full = {(r["model"], r["tokens"], r["context"]): r for r in found if r["way"] == "full"}
    cells: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for r in found:  # what was measured twice counts once
        key = r["model"], r["tokens"], -r["keys"], r["values"], [*WAYS].index(r["way"])
        cells.setdefault(key, {})[r["context"]] = r
    out = []
    for (model, tokens, bits, values, way), each in sorted(cells.items()):
        some = [*each.values()]
        plain = [full[model, tokens, r["context"]] for r in some]
        out.append(
            {
                "model": model,
                "tokens": tokens,
                "keys": -bits,
                "values": values,
                "way": [*WAYS.values()][way],
                "contexts": len(some),
                "asks": sum(len(r["answers"]) for r in some),
                "text": f"{_mean([r['text'] - f['text'] for r, f in _both(some, plain)]):+.3f}",
                "answers": f"{_mean([_nll(r) - _nll(f) for r, f in _both(some, plain)]):+.3f}",
                "exact": sum(r["exact"] for r in some),
                "exact_full": sum(f["exact"] for f in plain),
            }
        )
    return out


def _both(some: list[Any], plain: list[Any]) -> Any:
    return zip(some, plain, strict=True)


def _nll(row: dict[str, Any]) -> float:
    return _mean(row["answers"])


def _mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


def points(rows: list[dict[str, Any]]) -> list[dict[str, object]]:
    """Losses of starting points, a row each."""
    return [
        {
            "model": r["model"],
            "point": r["point"],
            "offset": r["offset"],
            "slots": r["slots"],
            "tokens": r["tokens"],
            "nll_full": f"{r['nll_full']:.3f}",
            "dnll": f"{r['dnll']:+.3f}",
        }
        for r in rows
    ]


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--out", type=Path, default=HERE)
    out = ask.parse_args().out
    measured = [r for r in records("*") if "kind" in r]
    tables = {
        "energy": energy(measured),
        "losses": losses(measured),
        "points": points(records("*-points")),
    }
    for name, found in tables.items():
        if not found:
            continue
        text = io.StringIO()
        writer = csv.DictWriter(text, fieldnames=list(found[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)
        (out / f"{name}.csv").write_text(text.getvalue(), newline="\n")


if __name__ == "__main__":
    main()
