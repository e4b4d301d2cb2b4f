"""From the records to the tables. `python derive.py --out FOLDER`.

`ladder.csv`: LaCache's Table 1, at 1024 and all scored tokens of a window; `long.csv`: a window of
8192 tokens at four lengths. `ablation.csv`: spans and overlaps. `tiers.csv`: XMU's Table 2;
`curve.csv`: its Figure 4. `kept.csv`: pairs of both papers in runs that other studies keep.
`needles.csv` and `questions.csv`: answers. `orderings.csv`: what the papers order, cell by cell,
with what they print, and the same difference here. A part without records has no table.

Differences are paired and in nats: of text per token, over blocks of about 1024 tokens
(`kvsearch.results.intervals`), of answers over contexts or questions. Intervals are 95 %; an
ordering holds if its interval has no 0.
"""

import argparse
import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from kept import pairs

from kvsearch.policy.ladder import rungs
from kvsearch.results.intervals import Blocks, clustered, common, paired, wilson
from kvsearch.results.records import Interval

HERE = Path(__file__).parent
MODELS = ("smollm2-135m", "gemma-3-270m")
LAYERS = 30  # of SmolLM2-135M, whose ladders were ablated
ABLATED = "256"  # slots
PER_1K = 8  # blocks of 128 tokens in 1024
NAMES = {(0.25, 0.5): "lacache", (0.5, 0.0): "lacache-half"}  # ladders that are methods
RATIOS = ("0.1", "0.2", "0.4", "0.6", "0.8")
# XMU's Table 2 (LLaMA-13B): perplexity on WikiText-2, whole, uncorrected, evicted; then accuracy
TABLE2 = {
    "0.1": ((6.32, 9.24, 17.67), (0.428, 0.377, 0.324)),
    "0.2": ((6.05, 7.31, 6.84), (0.434, 0.412, 0.428)),
    "0.4": ((5.96, 6.14, 6.12), (0.436, 0.425, 0.432)),
    "0.6": ((5.74, 5.94, 5.68), (0.432, 0.430, 0.435)),
    "0.8": ((5.67, 5.76, 5.53), (0.438, 0.434, 0.438)),
}
# LaCache's Table 1 (Llama2-7B): perplexity of StreamingLLM and LaCache by slots and length
TABLE1 = {("512", 1): (5.54, 4.53), ("512", 2): (5.84, 5.00), ("256", 1): (6.08, 5.57)}
TABLE1 |= {("256", 2): (6.38, 5.98), ("512", 8): (6.93, 6.61), ("256", 8): (7.52, 7.34)}
Row = dict[str, object]


@dataclass(frozen=True)
class Text:
    """Rows of one part and model, by where and name."""

    rows: dict[tuple[str, str], dict[str, Any]]

    def has(self, *keys: tuple[str, str]) -> bool:
        """Whether all of these were measured."""
        return all(key in self.rows for key in keys)

    def losses(self, key: tuple[str, str], thousands: int | None = None) -> Blocks:
        """Sums over blocks of every window, of its first so many times 1024 tokens."""
        row = self.rows[key]
        sums, tokens = np.array(row["sums"]), row["tokens"]
        sizes = np.full(sums.shape[1], 128)
        sizes[-1] = tokens - 128 * (len(sizes) - 1)
        last = None if thousands is None else thousands * PER_1K
        return Blocks(sums[:, :last], sizes[:last])

    def gap(self, a: tuple[str, str], b: tuple[str, str], thousands: int | None = None) -> Interval:
        """Paired difference on the windows that both have."""
        return paired(*common(self.losses(a, thousands), self.losses(b, thousands)))

    def line(self, key: tuple[str, str], thousands: int | None = None) -> Row:
        """What every table says of a row."""
        mine, row = self.losses(key, thousands), self.rows[key]
        return {
            "n": mine.size, "ppl": f"{np.exp(mine.mean()):.2f}", "slots_mean": row["slots_mean"],
            "slots_peak": row["slots_peak"],
            **bounds(self.gap(key, ("0", "full"), thousands), "dnll_full"),
        }  # fmt: skip


def lines(part: str, model: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Records of one part by key; none where it was not measured."""
    file = HERE / "records" / f"{part}-{model}.jsonl"
    found = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {tuple(row["key"]): row for row in found}


def bounds(d: Interval, name: str) -> Row:
    """Three columns."""
    return {name: f"{d.mean:+.4f}", f"{name}_lo": f"{d.lo:+.4f}", f"{name}_hi": f"{d.hi:+.4f}"}


def blank(name: str) -> Row:
    """Three empty ones."""
    return dict.fromkeys((name, f"{name}_lo", f"{name}_hi"), "")


def ladder(part: str, thousands: tuple[int | None, ...]) -> list[Row]:
    """LaCache's Table 1, with differences to StreamingLLM at as many slots."""
    out = []
    for model in MODELS:
        text = Text(lines(part, model))
        for at, name in sorted(text.rows, key=lambda key: (int(key[0]), key[1])):
            for size in thousands:
                length = size * 1024 if size else text.rows[at, name]["tokens"] + 1
                row: Row = {"model": model, "slots": at, "policy": name, "length": length}
                row |= text.line((at, name), size)
                window = (at, "streamingllm")
                if name not in ("full", "streamingllm") and text.has(window):
                    row |= bounds(text.gap((at, name), window, size), "to_streamingllm")
                else:
                    row |= blank("to_streamingllm")
                out.append(row)
    return out


def ablated() -> Text:
    """Rows of the ablation, with those that are methods."""
    rows = {key: row for key, row in lines("ladder", MODELS[0]).items() if key[0] in ("0", ABLATED)}
    return Text(rows | lines("ablation", MODELS[0]))


def key_of(span: float, overlap: float) -> tuple[str, str]:
    """Where the records have a ladder."""
    return ABLATED, NAMES.get((span, overlap), f"span {span:g}, overlap {overlap:g}")


def ablation() -> list[Row]:
    """Spans and overlaps, with differences to the paper's rule on the windows that both have."""
    text, out = ablated(), list[Row]()
    for span in (0.125, 0.25, 0.5) if lines("ablation", MODELS[0]) else ():
        for overlap in (0.0, 0.25, 0.5):
            key = key_of(span, overlap)
            if not text.has(key, ("0", "full"), (ABLATED, "streamingllm")):
                continue
            rung = rungs(LAYERS, span, overlap)
            row: Row = {"span": span, "overlap": overlap, "B": rung.B, "A": rung.A}
            row |= text.line(key) | bounds(
                text.gap(key, (ABLATED, "streamingllm")), "to_streamingllm"
            )
            own = key == key_of(0.25, 0.5)
            row |= blank("to_rule") if own else bounds(text.gap(key, key_of(0.25, 0.5)), "to_rule")
            out.append(row)
    return out


def tiers() -> list[Row]:
    """XMU's Table 2, with differences to the whole method at the same ratio."""
    out = []
    for model in MODELS:
        text = Text(lines("tiers", model))
        for at, name in sorted(text.rows):
            row: Row = {"model": model, "ratio": at, "policy": name, **text.line((at, name))}
            whole = (at, "whole, as printed" if name.endswith("as printed") else "whole")
            other = at != "0" and name != whole[1] and text.has(whole)
            row |= bounds(text.gap((at, name), whole), "to_whole") if other else blank("to_whole")
            out.append(row)
    return out


def evicting(model: str) -> Text:
    """Full cache, XMU's score and H2O's, without tiers."""
    more = lines("curve", model)
    own = lines("tiers", model) if more else {}
    return Text({k: v for k, v in own.items() if k[1] in ("full", "evicted")} | more)


def curve() -> list[Row]:
    """XMU's Figure 4, with differences of H2O to XMU's score at the same ratio."""
    out = []
    for model in MODELS:
        text = evicting(model)
        for at, name in sorted(text.rows):
            row: Row = {"model": model, "ratio": at, "policy": name, **text.line((at, name))}
            own = (at, "evicted")
            other = name not in ("full", "evicted") and text.has(own)
            row |= bounds(text.gap((at, name), own), "to_xmu") if other else blank("to_xmu")
            out.append(row)
    return out


def over(values: list[float] | np.ndarray) -> Interval:
    """Mean over contexts or questions."""
    return clustered(np.asarray(values, float), [str(i) for i in range(len(values))])


def needles() -> list[Row]:
    """One needle: exact answers, NLL, and the share of what the context is worth that is lost."""
    out = []
    for model in MODELS:
        rows = lines("needles", model)
        for (see, name), row in rows.items():
            n, nll = len(row["nll"]), np.array(row["nll"])
            share = wilson(sum(row["exact"]), n)
            full, empty = (np.array(rows["agnostic", x]["nll"]) for x in ("full", "empty"))
            lost = (nll.mean() - full.mean()) / (empty.mean() - full.mean())
            line: Row = {
                "model": model, "see": see, "policy": name, "slots": row["slots"] or "", "n": n,
                "exact": sum(row["exact"]), "lo": f"{share.lo:.2f}", "hi": f"{share.hi:.2f}",
                "nll": f"{nll.mean():.3f}", "context_lost": f"{lost:.2f}",
            }  # fmt: skip
            window = rows.get((see, "streamingllm"))
            if name == "lacache" and window is not None:
                line |= bounds(over(nll - np.array(window["nll"])), "to_streamingllm")
            else:
                line |= blank("to_streamingllm")
            out.append(line)
    return out


class Questions:
    """Answers to OpenBookQA of one model."""

    def __init__(self, model: str) -> None:
        self.rows = lines("questions", model)
        about = self.rows.pop(("0", "questions"), None)
        self.right = np.array(about["right"] if about else [])
        self.size = np.array(about["characters"] if about else [])

    def margins(self, key: tuple[str, str]) -> np.ndarray:
        """Right answer over the best wrong one, nats per character `[N]`."""
        score = np.array(self.rows[key]["logprobs"]) / self.size
        mine = np.arange(len(score)), self.right
        best = score[mine]
        score[mine] = -np.inf
        return best - score.max(1)

    def chosen(self, key: tuple[str, str]) -> np.ndarray:
        """The choice in every question `[N]`."""
        return (np.array(self.rows[key]["logprobs"]) / self.size).argmax(1)


def questions() -> list[Row]:
    """OpenBookQA: accuracy, margin, and how often the choice is the full cache's."""
    out = []
    for model in MODELS:
        asked = Questions(model)
        for key in sorted(asked.rows):
            hit, n = asked.margins(key) > 0, len(asked.right)
            share = wilson(int(hit.sum()), n)
            same = int((asked.chosen(key) == asked.chosen(("0", "full"))).sum())
            agreed = wilson(same, n)
            line: Row = {
                "model": model, "ratio": key[0], "policy": key[1], "n": n,
                "accuracy": f"{hit.mean():.3f}", "lo": f"{share.lo:.3f}", "hi": f"{share.hi:.3f}",
                "as_full": f"{same / n:.3f}", "as_full_lo": f"{agreed.lo:.3f}",
                "as_full_hi": f"{agreed.hi:.3f}", "slots_end": asked.rows[key]["slots_end"],
            }  # fmt: skip
            for column, other in (
                ("margin_to_full", ("0", "full")),
                ("to_whole", (key[0], "whole")),
            ):
                known = other in asked.rows and other != key
                gap = over(asked.margins(key) - asked.margins(other)) if known else None
                line |= blank(column) if gap is None else bounds(gap, column)
            out.append(line)
    return out


def kept() -> list[Row]:
    """LaCache beside StreamingLLM, and XMU's score beside H2O's, in runs of other studies."""
    out = []
    for pair in pairs():
        a, b = pair.losses
        out.append({
            "study": pair.study, "slots": pair.slots, "text": pair.text, "windows": len(a.sums),
            "n": a.size, "policy": pair.names[0], "other": pair.names[1],
            "ppl": f"{np.exp(a.mean()):.2f}", "other_ppl": f"{np.exp(b.mean()):.2f}",
            **bounds(paired(a, b), "dnll"),
        })  # fmt: skip
    return out


def claims(model: str) -> Iterator[tuple[str, str, str, str, Interval]]:
    """Paper, claim, cell, what is printed, and the difference that is below 0 if it holds."""
    for part, lengths in (("ladder", (1, 2)), ("long", (8,))):
        text = Text(lines(part, model))
        for slots in ("128", "256", "512"):
            for size in lengths:
                keys = (slots, "lacache"), (slots, "streamingllm")
                if text.has(*keys):
                    printed = TABLE1.get((slots, size))
                    said = f"{np.log(printed[1] / printed[0]):+.3f}" if printed else ""
                    gap = text.gap(*keys, 1 if size == 1 else None)
                    yield "LaCache", "LaCache < StreamingLLM", f"{slots} slots, {size}K", said, gap
    for pair in pairs() if model == MODELS[0] else ():
        ladders = pair.names[0] == "lacache"
        claim = "LaCache < StreamingLLM" if ladders else "evicted < h2o"
        cell = f"{pair.slots} slots, {pair.text}"
        yield "LaCache" if ladders else "XMU", claim, cell, "", paired(*pair.losses)
    text = Text(lines("ladder", model))
    for slots in ("128", "256", "512"):
        keys = (slots, "lacache-contiguous"), (slots, "lacache")
        if text.has(*keys):
            yield "LaCache", "order of the text < order of the code", slots, "", text.gap(*keys)
    if model == MODELS[0]:
        text, rule = ablated(), key_of(0.25, 0.5)
        for span in (0.125, 0.25, 0.5):
            for overlap in (0.0, 0.25, 0.5):
                key = key_of(span, overlap)
                if key != rule and text.has(key, rule):
                    cell = f"span {span:g}, overlap {overlap:g}"
                    yield "LaCache", "S = L/4, O = S/2 < another", cell, "", text.gap(rule, key)
    asked = lines("needles", model)
    for see in ("agnostic", "aware"):
        if {(see, "lacache"), (see, "streamingllm")} <= asked.keys():
            gap = over(np.subtract(*(asked[see, x]["nll"] for x in ("lacache", "streamingllm"))))
            said = "99.16 % against 54.54 %" if see == "aware" else ""
            yield "LaCache", "needle: LaCache < StreamingLLM", f"50 %, question {see}", said, gap
    yield from of_xmu(model)


def of_xmu(model: str) -> Iterator[tuple[str, str, str, str, Interval]]:
    """Table 2 and Figure 4."""
    text, plain, asked = Text(lines("tiers", model)), evicting(model), Questions(model)
    for at in RATIOS:
        ppl, accuracy = TABLE2[at]
        for i, other in enumerate(("uncorrected", "evicted"), 1):
            ahead = ppl[0] < ppl[i]
            pair = ("whole", other) if ahead else (other, "whole")
            said = f"{(1 if ahead else -1) * np.log(ppl[0] / ppl[i]):+.3f}"
            keys = [(at, name) for name in pair]
            if text.has(*keys):
                yield "XMU", f"{pair[0]} < {pair[1]}", f"ratio {at}", said, text.gap(*keys)
            if keys[0] in asked.rows and keys[1] in asked.rows:
                order = accuracy[0] - accuracy[i]
                if not order:
                    continue
                best, worst = ("whole", other) if order > 0 else (other, "whole")
                gap = over(asked.margins((at, worst)) - asked.margins((at, best)))
                said = f"{-abs(order):+.3f} accuracy"
                yield "XMU", f"OpenBookQA: {best} > {worst}", f"ratio {at}", said, gap
    for name in ("h2o", "h2o, no recent window"):
        for at in RATIOS:
            keys = [(at, "evicted"), (at, name)]
            if plain.has(*keys):
                yield "XMU", f"evicted < {name}", f"ratio {at}", "", plain.gap(*keys)


def orderings() -> list[Row]:
    """Whether each ordering holds here."""
    out = []
    for model in MODELS:
        for paper, claim, cell, printed, gap in claims(model):
            said = "holds" if gap.hi < 0 else "reversed" if gap.lo > 0 else "not told apart"
            out.append({
                "model": model, "paper": paper, "claim": claim, "cell": cell, "printed": printed,
                **bounds(gap, "here"), "verdict": said,
            })  # fmt: skip
    return out


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--out", type=Path, default=HERE)
    out = ask.parse_args().out
    for name, rows in (
        ("ladder", ladder("ladder", (1, None))), ("long", ladder("long", (1, 2, 4, None))),
        ("ablation", ablation()), ("tiers", tiers()), ("curve", curve()), ("kept", kept()),
        ("needles", needles()), ("questions", questions()), ("orderings", orderings()),
    ):  # fmt: skip
        if rows:
            with open(out / f"{name}.csv", "w", newline="") as f:
                writer = csv.DictWriter(f, list(rows[0]), lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)


if __name__ == "__main__":
    main()
