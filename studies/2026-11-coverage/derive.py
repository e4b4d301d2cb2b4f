"""From kept losses to how often intervals hold on other windows, and how often races stop wrongly.

`coverage.csv`, of text and of prompts, and its means `texts.csv`; `stops.csv`, and `cost.csv` with
the tokens of races.

python derive.py --out FOLDER
"""

import argparse
import csv
import io
import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from math import comb
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from kvsearch.results.intervals import Blocks, blocks, corrected, interval, spread, standard_error
from kvsearch.results.student_t import quantile

HERE = Path(__file__).parent
RECORDS = HERE.parent / "2026-11-search-efficiency" / "records"
AXES = HERE.parent / "2026-11-axes" / "records"
PROMPTS = HERE.parent / "2026-11-workloads" / "records"
FALSE, PARTS = 0.002, 16  # false stops of a race, and its blocks a window
BEFORE = 64  # tokens of a block, of all intervals until this study
RIVALS, NEAR = 6, 40  # of a race, out of so many policies of like loss
RACES = 4000
ROWS = 16  # of a report, that its intervals are corrected for
KINDS = ("before", "alone", "moderated")
PAIRS = 60  # of many policies
SPLITS = 100  # of many contexts


@dataclass(frozen=True)
class Kept:
    """Losses over the full cache of policies on windows of one text, in blocks.

    Attributes:
        windows: what they are.
        tokens: of each block.
        sums: `[windows, blocks]` by policy.
    """

    windows: str
    tokens: np.ndarray
    sums: dict[str, np.ndarray]

    def difference(self, one: str, other: str) -> Blocks:
        """Paired losses of two policies."""
        return Blocks(self.sums[one] - self.sums[other], self.tokens)


def measured() -> dict[str, Kept]:
    """Policies of `measure.py`: eight windows of each text."""
    found = {}
    for file in sorted((HERE / "records").glob("*.json")):
        kept = json.loads(file.read_text())
        found[file.stem] = _kept("8 windows of 1536", kept["tokens"], kept["block"], kept["sums"])
    return found


def longer() -> dict[str, Kept]:
    """Policies of the study of the axes: two and four windows of 4096 of each text."""
    found = {}
    for text in ("wikitext", "sotu"):
        one, other = (
            json.loads((AXES / f"{part}-{text}-b256.json").read_text())
            for part in ("tune", "report")
        )
        both = [k for k in one if k in other]
        sums = {k: one[k]["sums"] + other[k]["sums"] for k in both}
        found[text] = _kept("6 windows of 4096", one["full"]["tokens"], 128, sums)
    return found


def many() -> Kept:
    """Policies of the searches on WikiText-2: two search and two report windows of 1024."""
    about = json.loads((RECORDS / "about.json").read_text())
    rows = pq.read_table(RECORDS / "blocks.parquet").to_pylist()
    sums = {(r["part"], r["fingerprint"]): np.reshape(r["sums"], (2, -1)) for r in rows}
    keys = sorted(k for p, k in sums if p == "report" and ("search", k) in sums)
    each = {k: np.concatenate([sums["search", k], sums["report", k]]).tolist() for k in keys}
    each["full"] = each.pop(about["full"])
    return _kept("4 windows of 1024", 14 * about["block"], about["block"], each)


def _kept(windows: str, tokens: int, block: int, sums: dict[str, list]) -> Kept:
    full = np.array(sums["full"])
    sizes = np.full(full.shape[1], block)
    sizes[-1] = tokens - block * (full.shape[1] - 1)
    return Kept(windows, sizes, {k: np.array(v) - full for k, v in sums.items()})


def prompts() -> Iterator[tuple[str, Kept]]:
    """Losses at answers, of tasks of which eight policies and more were measured, by context."""
    for file in sorted(PROMPTS.glob("*-*.json")):
        rows = json.loads(file.read_text())
        groups, full = rows.pop("groups"), rows.pop("all")["full"]["nll"]
        known = sorted({*groups})
        asks = len(groups) // len(known)
        for share, cell in rows.items():
            nll = {"full": full} | {n: r["nll"] for n, r in cell.items()}
            if len(nll) >= 8 and len(groups) == asks * len(known):
                at = np.argsort([known.index(g) for g in groups], kind="stable")
                each = {
                    n: (np.array(x) - np.array(full))[at].reshape(-1, asks).sum(1, keepdims=True)
                    for n, x in nll.items()
                }
                what = f"{len(known)} contexts, {share} of the bytes"
                yield file.stem, Kept(what, np.array([asks]), each)


# -- coverage ------------------------------------------------------------------------------------


Halves = list[tuple[float, float]]  # mean and half width of each difference


def before(differences: list[Blocks], level: float = 0.95) -> Halves:
    """As it was: a normal quantile, short blocks."""
    short = max(BEFORE, int(differences[0].tokens[0]))
    return [(x.mean(), 1.959964 * standard_error(x, short)) for x in differences]


def alone(differences: list[Blocks], level: float = 0.95) -> Halves:
    """Student's t over long blocks, each difference by itself."""
    found = [interval(x, level=level) for x in differences]
    return [(x.mean, x.hi - x.mean) for x in found]


def moderated(differences: list[Blocks], level: float = 0.95) -> Halves:
    """As reports have it: with what all of them say of the variance of one."""
    together = spread((x,) for x in differences)
    found = [interval(x, level=level, spread=together) for x in differences]
    return [(x.mean, x.hi - x.mean) for x in found]


def pairs(kept: Kept) -> dict[str, list[tuple[str, str]]]:
    """Pairs of policies, and policies with the full cache."""
    names, rng = [k for k in kept.sums if k != "full"], np.random.default_rng(0)
    every = list(combinations(names, 2))
    if len(every) > PAIRS:
        every = [every[i] for i in rng.choice(len(every), PAIRS, replace=False)]
    return {"pairs": every, "against full": [(k, "full") for k in names]}


def splits(n: int, sample: int) -> list[tuple[int, ...]]:
    """All ways to take some of `n` windows, or as many at random."""
    if comb(n, sample) <= SPLITS:
        return list(combinations(range(n), sample))
    rng = np.random.default_rng(0)
    return [tuple(sorted(rng.choice(n, sample, replace=False))) for _ in range(SPLITS)]


def coverage(
    kept: Kept, what: list[tuple[str, str]], sample: int, how: Callable[..., Halves]
) -> float:
    """How often the interval of some windows holds the mean of all the others.

    That mean is uncertain as well, so the interval is widened by sqrt(n / (n - sample)): for
    independent windows of a normal distribution the share is then that of the t quantile exactly.
    """
    held, all_of = [], [kept.difference(one, other) for one, other in what]
    n = len(all_of[0].sums)
    for mine in splits(n, sample):
        rest = [i for i in range(n) if i not in mine]
        found = how([Blocks(x.sums[list(mine)], x.tokens) for x in all_of])
        for x, (mean, half) in zip(all_of, found, strict=True):
            apart = mean - Blocks(x.sums[rest], x.tokens).mean()
            held.append(abs(apart) <= half * (n / (n - sample)) ** 0.5)
    return float(np.mean(held))


def width(kept: Kept, what: list[tuple[str, str]], sample: int) -> float:
    """Median half width, corrected for `ROWS` rows, over that of each difference by itself."""
    all_of, level = [kept.difference(one, other) for one, other in what], corrected(ROWS)
    ratios = []
    for mine in splits(len(all_of[0].sums), sample):
        some = [Blocks(x.sums[list(mine)], x.tokens) for x in all_of]
        pairs = zip(moderated(some, level), alone(some, level), strict=True)
        ratios += [a[1] / b[1] for a, b in pairs if b[1] > 0]
    return float(np.median(ratios))


def table() -> Iterator[dict[str, object]]:
    """A row per text, windows, kind of difference and size of the sample."""
    sources = [("wikitext", many())]
    sources += [*longer().items(), *measured().items(), *prompts()]
    for text, kept in sources:
        n = len(next(iter(kept.sums.values())))
        for kind, what in pairs(kept).items():
            for sample in sorted({1, 2, n // 2} if n < 9 else {4, 8, n // 2}):
                row: dict[str, object] = {
                    "text": text, "windows": kept.windows, "differences": kind,
                    "policies": len(kept.sums) - 1, "sample": sample, "of": n,
                }  # fmt: skip
                for how in (before, alone, moderated):
                    row[how.__name__] = f"{coverage(kept, what, sample, how):.3f}"
                row["width"] = f"{width(kept, what, sample):.2f}"
                yield row


def texts(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """Means per text over windows and kinds of difference, half of the windows against the rest."""
    out: list[dict[str, object]] = []
    for text in dict.fromkeys(r["text"] for r in rows):
        half = [r for r in rows if r["text"] == text and r["sample"] == r["of"] // 2]
        means = {k: f"{np.mean([float(r[k]) for r in half]):.3f}" for k in KINDS}
        out.append({"text": text, "rows": len(half), **means})
    return out


# -- races ---------------------------------------------------------------------------------------


def behind(x: Blocks, rivals: int) -> bool:
    """Whether a race stops a policy that is behind by `x`, as searches did until November 2026."""
    scored, have = int(x.tokens.sum()), int(x.tokens[0])
    block = max(64, -(-scored // PARTS))
    each = blocks(x, -(-block // have) * have)
    return x.mean() > quantile(1 - FALSE / rivals, each.count - 1) * standard_error(
        x, -(-block // have) * have
    )


def behind_before(x: Blocks, rivals: int) -> bool:
    """The rule until this study, after one whole window: three standard errors of short blocks."""
    return x.mean() > 3 * standard_error(x, max(BEFORE, int(x.tokens[0])))


def centred(kept: Kept) -> Kept:
    """Every policy with the same mean loss over all windows."""
    size = len(next(iter(kept.sums.values()))) * int(kept.tokens.sum())
    sums = {k: v - v.sum() / size * kept.tokens for k, v in kept.sums.items() if k != "full"}
    return Kept(kept.windows, kept.tokens, sums)


def races(kept: Kept) -> Iterator[tuple[str, list[str], int]]:
    """Policies, six rivals of like loss, and the window that they are compared on."""
    order = sorted((k for k in kept.sums if k != "full"), key=lambda k: float(kept.sums[k].sum()))
    windows, rng = len(next(iter(kept.sums.values()))), np.random.default_rng(0)
    if len(order) <= NEAR:  # every policy against all the others
        yield from ((k, [o for o in order if o != k], w) for k in order for w in range(windows))
        return
    for _ in range(RACES):
        start = int(np.clip(rng.integers(len(order)) - NEAR // 2, 0, len(order) - NEAR))
        mine, *rivals = (order[start + i] for i in rng.choice(NEAR, RIVALS + 1, replace=False))
        yield mine, rivals, int(rng.integers(windows))


def stops() -> Iterator[dict[str, object]]:
    """A row per text: false stops under equal loss, before and now."""
    sources = [("wikitext", many()), *measured().items()]
    for text, kept in sources:
        equal, found, count = centred(kept), dict.fromkeys(("before", "now"), 0), 0
        for mine, rivals, w in races(kept):
            count += 1
            x = [Blocks(equal.sums[mine][[w]] - equal.sums[r][[w]], equal.tokens) for r in rivals]
            best = max(x, key=lambda d: d.mean())
            found["before"] += behind_before(best, 1)
            found["now"] += any(behind(d, len(rivals)) for d in x)
        yield {
            "text": text, "windows": kept.windows, "rivals": len(rivals), "races": count,
            **{k: f"{v / count:.4f}" for k, v in found.items()},
        }  # fmt: skip


def cost() -> dict[str, object]:
    """Tokens of the kept races with the present rule, over those that they took.

    Proposals stay as they were and in the order in which they ended.
    """
    rows = pq.read_table(RECORDS / "blocks.parquet").to_pylist()
    sums = {r["fingerprint"]: np.reshape(r["sums"], (2, -1)) for r in rows if r["part"] == "search"}
    tokens = np.full(14, 64)
    runs = defaultdict(list)
    for t in pq.read_table(RECORDS / "trials.parquet").to_pylist():
        if "-race-" in t["run"] and not t["run"].startswith("earlier") and t["tokens"]:
            runs[t["run"]].append(t)
    spent, then, stopped, stopped_then = 0, 0, 0, 0
    for trials in runs.values():
        done: list[dict] = []
        for t in trials:
            rivals = [d for d in done if d["bytes_peak"] <= t["bytes_peak"]]
            mine = sums[t["fingerprint"]]
            stop = any(
                behind(Blocks(mine[:1] - sums[r["fingerprint"]][:1], tokens), len(rivals))
                for r in rivals
                if r["fingerprint"] != t["fingerprint"]
            )
            spent += 1024 if stop else 2048
            then += t["tokens"]
            stopped += stop
            stopped_then += t["state"] == "pruned"
            if not stop:
                done.append(t)
    return {
        "runs": len(runs), "stopped_before": stopped_then, "stopped_now": stopped,
        "tokens_before": then, "tokens_now": spent, "more_tokens": f"{spent / then - 1:.3f}",
    }  # fmt: skip


def write(rows: list[dict[str, object]], file: Path) -> None:
    text = io.StringIO()
    out = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    out.writeheader()
    out.writerows(rows)
    file.write_text(text.getvalue(), newline="\n")


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--out", type=Path, default=HERE)
    out = ask.parse_args().out
    rows = list(table())
    write(rows, out / "coverage.csv")
    write(texts(rows), out / "texts.csv")
    write(list(stops()), out / "stops.csv")
    write([cost()], out / "cost.csv")


if __name__ == "__main__":
    main()
