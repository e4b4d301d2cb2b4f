"""The tables of this study from its records.

python derive.py --out FOLDER

Differences are paired by windows of text, or by questions; intervals are 95 %, Student's t over
windows (`kvsearch.results.intervals`) or questions. `holds` of an ordering means that its
interval has no 0.
"""

import argparse
import csv
import io
import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from kvsearch.results.intervals import Blocks, interval, paired
from kvsearch.results.records import Interval

HERE = Path(__file__).parent
TEXTS = ("wikitext", "sotu")
SCORES = ("01", "l1", "l2", "taylor")
WINDOW = 127  # scored tokens of a window, for channels
SLOT = 23040  # bytes of a token's keys and values in all layers
Row = dict[str, object]
ROW_OF = "window, {} bytes of {}"
TRAINED = {"anchors": 61440, "anchors-short": 8192}  # tokens, by file of records

# what the paper's Tables III and IV say: the first has the lower perplexity
WITHIN = {
    "before": {20: "taylor l1 l2", 50: "l2 l1 taylor"},
    "after": {20: "taylor l2 l1", 50: "l2 taylor l1"},
}


def records(part: str) -> dict[str, Any]:
    """Rows of one file by name."""
    file = HERE / "records" / f"{part}.json"
    return json.loads(file.read_text()) if file.exists() else {}


def losses(sums: list[float], tokens: int) -> Blocks:
    """Windows of one text, each a block."""
    return Blocks(np.array(sums)[:, None], np.array([tokens]))


def bounds(d: Interval, name: str) -> Row:
    """Three columns."""
    return {name: f"{d.mean:+.4f}", f"{name}_lo": f"{d.lo:+.4f}", f"{name}_hi": f"{d.hi:+.4f}"}


def verdict(d: Interval) -> str:
    """Of a claim that the difference is below 0."""
    return "holds" if d.hi < 0 else "reversed" if d.lo > 0 else "not told apart"


def channels() -> list[Row]:
    """Tables III and IV: one row per cell and text."""
    kept, out = records("channels"), []
    for name, text in product(kept, TEXTS):
        row, full = kept[name], kept["full"]
        before, base = (losses(x["before"][text], WINDOW) for x in (row, full))
        line: Row = {
            "policy": name, "text": text, "n": before.size, "token_bytes": row["token_bytes"],
            "layers_gone": row["layers_gone"], "ppl_before": f"{np.exp(before.mean()):.2f}",
            **bounds(paired(before, base), "before_to_full"),
            "ppl_after": "", "steps": "",
        }  # fmt: skip
        empty = Interval(float("nan"), float("nan"), float("nan"))
        found = dict.fromkeys(("after_to_before", "after_to_trained_full"), empty)
        if "after" in row:
            after = losses(row["after"][text], WINDOW)
            line |= {"ppl_after": f"{np.exp(after.mean()):.2f}", "steps": row["steps"]}
            found["after_to_before"] = paired(after, before)
            if "after" in full:
                control = losses(full["after"][text], WINDOW)
                found["after_to_trained_full"] = paired(after, control)
        for column, d in found.items():
            line |= dict.fromkeys(bounds(d, column), "") if np.isnan(d.mean) else bounds(d, column)
        out.append(line)
    return out


def claims() -> list[tuple[str, str, str, str]]:
    """Claim, state, and the two cells of which the first is to have the lower loss."""
    found = []
    for state, percent in product(("before", "after"), (20, 50)):
        for score in SCORES:
            cells = (f"ppl-{score}-{percent}", f"uniform-{score}-{percent}")
            found.append(("shares by perplexity beat uniform ones", state, *cells))
        for spread, score in product(("ppl", "uniform"), SCORES[1:]):
            cells = (f"{spread}-01-{percent}", f"{spread}-{score}-{percent}")
            found.append(("whole layers beat channels", state, *cells))
        order = WITHIN[state][percent].split()
        for a, b in ((0, 1), (1, 2), (0, 2)):
            cells = (f"ppl-{order[a]}-{percent}", f"ppl-{order[b]}-{percent}")
            found.append((f"order of scores, {' < '.join(order)}", state, *cells))
    return found


def orderings() -> list[Row]:
    """Which of the paper's orderings hold, cell by cell."""
    kept, out = records("channels"), []
    for (claim, state, one, other), text in product(claims(), TEXTS):
        if all(state in kept.get(name, {}) for name in (one, other)):
            each = (losses(kept[name][state][text], WINDOW) for name in (one, other))
            d = paired(*each)
            out.append({
                "claim": claim, "lora": state, "text": text, "lower": one, "higher": other,
                **bounds(d, "dnll"), "verdict": verdict(d),
            })  # fmt: skip
    return out


def anchors() -> list[Row]:
    """One row per policy, model and text."""
    kept, out = records("anchors"), []
    for name, text in product(kept, TEXTS):
        row = kept[name][text]
        mine = losses(row["sums"], row["tokens"])
        full = losses(kept["full"][text]["sums"], row["tokens"])
        model = name.split()[1].strip(",:") if name.startswith("trained") else ""
        own = kept.get(f"trained {model}: full")
        line: Row = {
            "policy": name, "text": text, "n": mine.size, "slots": row["slots"] or "",
            "bytes_mean": row["bytes_mean"], "bytes_peak": row["bytes_peak"],
            "mean_slots": f"{row['bytes_mean'] / SLOT:.1f}", "ppl": f"{np.exp(mine.mean()):.2f}",
            **bounds(paired(mine, full), "to_full"),
        }  # fmt: skip
        columns = bounds(paired(mine, full), "to_trained_full")
        line |= dict.fromkeys(columns, "")
        if own is not None:
            line |= bounds(
                paired(mine, losses(own[text]["sums"], row["tokens"])), "to_trained_full"
            )
        out.append(line)
    return out


def against() -> list[Row]:
    """Anchors against sinks + window of equal mean bytes, both untrained or both trained."""
    out = []
    for part, name, text in product(TRAINED, ("ep", "ac"), TEXTS):
        kept, sized = records(part), ROW_OF.format("mean", name)
        for state, one, other in (
            ("untrained", f"{name}, 4 sinks", sized),
            ("trained", f"trained {name}, 4 sinks", f"trained window: {sized}"),
            ("trained anchors, untrained window", f"trained {name}, 4 sinks", sized),
            (
                "untrained, window of the peak bytes",
                f"{name}, 4 sinks",
                ROW_OF.format("peak", name),
            ),
        ):
            if one in kept and other in kept and (state == "trained" or part == "anchors"):
                a, b = kept[one][text], kept[other][text]
                mine, its = (losses(x["sums"], x["tokens"]) for x in (a, b))
                d = paired(mine, its)
                out.append({
                    "anchors": name, "text": text, "state": state,
                    "trained_on": "" if state.startswith("untrained") else TRAINED[part],
                    "n": mine.size, "anchor_bytes": a["bytes_mean"],
                    "window_bytes": b["bytes_mean"],
                    **bounds(d, "anchors_minus_window"), "anchors_lose_less": verdict(d),
                })  # fmt: skip
    return out


def questions() -> list[Row]:
    """Accuracy, and the margin of the right answer in nats per character, paired with others."""
    kept, out = records("qa"), []
    if not kept:
        return out
    asked = kept.pop("questions")
    right = np.array([x["right"] for x in asked])
    size = np.array([x["characters"] for x in asked])
    margins, hits = {}, {}
    for name, row in kept.items():
        score = np.array(row["logprobs"]) / size[: len(row["logprobs"])]
        mine = np.arange(len(score)), right[: len(score)]
        best = score[mine]
        score[mine] = -np.inf
        margins[name], hits[name] = best - score.max(1), best > score.max(1)
    for name, row in kept.items():
        model, _, rest = name.partition(": ")
        policy, _, shots = rest.partition(", ")
        n, hit = len(hits[name]), hits[name]
        low, high = wilson(int(hit.sum()), n)
        line: Row = {
            "model": model, "policy": policy, "shots": shots.split()[0], "n": n,
            "accuracy": f"{hit.mean():.3f}", "lo": f"{low:.3f}", "hi": f"{high:.3f}",
            **bounds(over(margins[name]), "margin"),
        }  # fmt: skip
        for column, other in (
            ("to_full", f"untrained: full, {shots}"),
            ("to_window", f"{'untrained' if model == 'untrained' else 'window'}: window, {shots}"),
        ):
            line |= dict.fromkeys(bounds(over(margins[name]), column), "")
            if other in margins and other != name:
                both = min(n, len(margins[other]))
                line |= bounds(over(margins[name][:both] - margins[other][:both]), column)
        line |= {"bytes_shown": row["bytes_shown"], "bytes_end": round(row["bytes_end"])}
        out.append(line)
    return out


def over(x: np.ndarray) -> Interval:
    """Mean over questions."""
    return interval(Blocks(x[:, None], np.array([1])))


def wilson(hits: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """Interval of a share of `n`."""
    p, d = hits / n, 1 + z * z / n
    middle, half = p + z * z / 2 / n, z * np.sqrt(p * (1 - p) / n + z * z / 4 / n / n)
    return float((middle - half) / d), float((middle + half) / d)


def cost() -> list[Row]:
    """Ratios of CPU seconds, and layers run in units of plain passes."""
    kept, out = records("cost"), []
    for name, pairs in kept.get("view", {}).items():
        plain, less = np.array(pairs).T
        d = over(np.log(less / plain))
        what = f"trial with channels to one without, {name}"
        out.append(ratio(what, len(pairs), *np.exp([d.mean, d.lo, d.hi]), 1.1))
    what = "sensitivity of all layers, in plain passes"
    if "layers" in kept:
        row = kept["layers"]
        out.append(ratio(f"{what}, by layers run", 1, row["ran"] / row["layers"], "", "", 35))
    if "sensitivity" in kept:
        row = kept["sensitivity"]
        each = row["seconds"] / np.array(row["plain"])
        limits = np.median(each), each.min(), each.max()
        out.append(ratio(f"{what}, by CPU seconds", len(each), *limits, 35))
    return out


def ratio(what: str, n: int, value: float, lo: Any, hi: Any, aim: float) -> Row:
    """One row; `lo` and `hi` are an interval, or the least and most."""
    words = ["" if isinstance(x, str) else f"{x:.3f}" for x in (value, lo, hi)]
    return {"what": what, "n": n, "ratio": words[0], "lo": words[1], "hi": words[2], "aim": aim}


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--out", type=Path, default=HERE)
    out = ask.parse_args().out
    for name, rows in (
        ("channels", channels()), ("orderings", orderings()), ("anchors", anchors()),
        ("against-window", against()), ("openbookqa", questions()), ("cost", cost()),
    ):  # fmt: skip
        if rows:
            text = io.StringIO()
            writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
            (out / f"{name}.csv").write_text(text.getvalue(), newline="\n")


if __name__ == "__main__":
    main()
