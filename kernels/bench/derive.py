"""Tables of what a quarter of an hour on a GPU has recorded.

    python derive.py --out FOLDER

Reads `records.jsonl` beside this file, and every `records/*.jsonl`; a study of a GPU is a copy of
this file with such records and a README. Every row names the card, its driver, versions and the
commit. Records of a stand-in are refused: their times are a CPU's, of tiny shapes.
"""

import argparse
import csv
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
Row = dict[str, Any]
MACHINE = ("gpu", "driver", "torch", "triton", "transformers", "commit")
SAME = ("gpu", "unit", "model", "context", "batch", "cache", "way", "op", "impl", "variant",
        "dtype", "pattern", "test", "trial", "windows", "number")  # fmt: skip
SEVEN = ("llama2-7b", "mistral-7b")  # of 7B
# bits: share of the read bandwidth
BANDWIDTH = {"16": 0.8, "8": 0.8, "4": 0.65, "2": 0.45}


def lines(path: Path) -> list[Row]:
    """Lines of a record; one that was cut off ends them."""
    found: list[Row] = []
    if path.exists():
        for line in path.read_bytes().splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                break
    return found


def latest(rows: Sequence[Row]) -> list[Row]:
    """Rows with the machine of their session; of each unit on each card those of its last key."""
    about = {row["session"]: row["about"] for row in rows if "about" in row}
    keys: dict[tuple[str, str, str], str] = {}
    for row in rows:
        if "key" in row:
            keys[about[row["session"]]["gpu"], row["stage"], row["unit"]] = row["key"]
    return [
        {k: about[row["session"]].get(k) for k in MACHINE} | row
        for row in rows
        if "key" in row
        and keys[about[row["session"]]["gpu"], row["stage"], row["unit"]] == row["key"]
    ]


def answers(rows: Sequence[Row], stage: str, *names: str) -> list[Row]:
    """Rows of a stage that have one of `names`; those that agree in `SAME` are one."""
    found: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        said = row.get("row", {})
        if row["stage"] == stage and any(name in said for name in names):
            known = {k: row[k] for k in MACHINE} | {"unit": row["unit"]} | said
            key = tuple(known.get(k) for k in SAME)
            found[key] = found.get(key, {}) | known
    return list(found.values())


def ends(rows: Sequence[Row]) -> list[Row]:
    """How each unit ended when it last ran, if it did not end as it should."""
    last = {(row["gpu"], row["unit"]): row for row in rows if "ended" in row}
    return [row for row in last.values() if row["ended"] != "done"]


def probes(rows: Sequence[Row]) -> list[Row]:
    """Each op's probe."""
    return [
        _of(x, "op", "dtype", "impl") | {"result": x["reason"] or "right", "seconds": x["seconds"]}
        for x in answers(rows, "a", "op")
        if "reason" in x
    ]


def tests(rows: Sequence[Row]) -> list[Row]:
    """How many tests of each name passed and failed."""
    found: dict[tuple[Any, ...], Counter[str]] = {}
    for row in answers(rows, "b", "test"):
        name = row["test"].rpartition("::")[2].partition("[")[0]
        found.setdefault((*(row[k] for k in MACHINE), name), Counter())[row["outcome"]] += 1
    return [
        dict(zip((*MACHINE, "test"), key, strict=True))
        | {k: count[k] for k in ("passed", "failed", "skipped")}
        for key, count in found.items()
    ]


def failures(rows: Sequence[Row]) -> list[Row]:
    """Tests that failed, and units that did not end as they should."""
    failed = [
        _of(x) | {"what": x["test"], "ended": "failed", "reason": x.get("reason", "")}
        for x in answers(rows, "b", "test")
        if x["outcome"] == "failed"
    ]
    return failed + [
        _of(x) | {"what": x["unit"], "ended": x["ended"], "reason": x["reason"]} for x in ends(rows)
    ]


def decoded(rows: Sequence[Row]) -> list[Row]:
    """Decoded tokens: medians, and how many times as fast as each full cache."""
    every = [x for x in answers(rows, "c", "ms", "kernels_ms") if "ms" in x]
    found = []
    for x in every:
        row = _of(x, "model", "context", "batch", "cache", "way") | _ms(x)
        row |= {"host_ms": x["host_ms"], "kernels_ms": x.get("kernels_ms", ""),
                "launches": x.get("launches", ""), "replayed": x.get("replayed", ""),
                "tokens_per_s": _short(x["batch"] / x["ms"][1] * 1e3),
                "peak_bytes": x["peak_bytes"], "resident_bytes": x.get("resident_bytes", ""),
                "sm_mhz": x["clocks"].get("clocks.sm", "")}  # fmt: skip
        for name, way in (("full", "eager"), ("static", "graphs"), ("compiled", "compiled")):
            row[f"times_{name}"] = _times(x, every, ("model", "context", "batch"), name, way)
        found.append(row)
    return found


def prompts(rows: Sequence[Row]) -> list[Row]:
    """Whole prompts: medians, and how many times as long as into the full cache."""
    every = answers(rows, "d", "ms")
    found = []
    for x in every:
        full = _times(x, every, ("model", "context", "batch"), "full")
        row = _of(x, "model", "context", "batch", "cache") | _ms(x)
        row |= {"read": x["times"], "of_full": _short(1 / float(full)) if full else "",
                "peak_bytes": x["peak_bytes"]}  # fmt: skip
        found.append(row)
    return found


def searched(rows: Sequence[Row]) -> list[Row]:
    """What each policy of a search cost and lost."""
    return [
        _of(x, "unit", "trial", "state", "windows", "tokens", "seconds", "dnll", "bytes_peak")
        for x in answers(rows, "e", "trial")
    ]


def attention(rows: Sequence[Row]) -> list[Row]:
    """Ops at one shape: the share of the read bandwidth, and times SDPA's speed."""
    roofs = {x["gpu"]: x["roof"] for x in answers(rows, "f", "roof")}
    every = [x for s in ("f", "ops") for x in answers(rows, s, "nbytes")]
    found = []
    for x in every:
        sdpa = [y["ms"][1] for y in every if y["impl"] == "sdpa" and
                all(y[k] == x[k] for k in ("gpu", "op", "model", "batch", "context"))]  # fmt: skip
        row = _of(x, "op", "impl", "model", "batch", "context", "variant") | _ms(x, 1e3, "us")
        roof = roofs.get(x["gpu"])
        row["of_read_roof"] = _short(x["nbytes"] / x["ms"][1] * 1e3 / roof) if roof else ""
        row["times_sdpa"] = _short(sdpa[0] / x["ms"][1]) if sdpa else ""
        found.append(row)
    return found


def patterns(rows: Sequence[Row]) -> list[Row]:
    """Attention over keys with lives, against FlexAttention."""
    every = [x for x in answers(rows, "f", "pattern") if "ms" in x]
    found = []
    for x in every:
        ours = [y["ms"][1] for y in every if y["impl"] == "ours" and
                all(y[k] == x[k] for k in ("gpu", "pattern", "context"))]  # fmt: skip
        row = _of(x, "pattern", "context", "slots", "pairs", "impl") | _ms(x, 1e3, "us")
        row |= {"of_ours": _short(x["ms"][1] / ours[0]) if ours else "", "off": x.get("off", "")}
        found.append(row)
    return found


def counters(rows: Sequence[Row]) -> list[Row]:
    """What ncu says of each launch."""
    return [
        _of(x, "number", "kernel") | {"metric": metric, "value": value}
        for x in answers(rows, "g", "kernel")
        for metric, value in x["metrics"].items()
    ]


def aims(rows: Sequence[Row]) -> list[Row]:
    """Each aim, and what was measured: the best policy, with tokens as CUDA graphs."""
    return [row | {"met": "yes" if row["met"] else "no"} for row in _aims(rows)]


def _aims(rows: Sequence[Row]) -> Iterator[Row]:
    tokens = [x for x in decoded(rows) if x["way"] == "graphs" and x["model"] in SEVEN]
    for context, batch, name, least in (
        (4096, 1, "full", 3.0), (4096, 1, "compiled", 1.1), (32768, 8, "compiled", 2.0),
    ):  # fmt: skip
        for x in tokens:
            at = (x["context"], x["batch"]) == (context, batch)
            if at and x[f"times_{name}"] and x["cache"] not in ("static", "full, ours"):
                times = float(x[f"times_{name}"])
                what = f"decode, {x['model']} {context}x{batch}, {x['cache']}: times {name}"
                yield _of(x) | {"aim": what, "bound": f">= {least}", "value": _short(times),
                                "met": times >= least}  # fmt: skip
    for x in prompts(rows):
        if x["of_full"] and x["cache"].startswith("scored") and x["context"] == 32768:
            what = f"prompt, {x['model']} 32768, {x['cache']}: times the full cache's"
            yield _of(x) | {"aim": what, "bound": "<= 1.5", "value": x["of_full"],
                            "met": float(x["of_full"]) <= 1.5}  # fmt: skip
    every = [x for x in attention(rows) if x["op"] == "decode_step" and x["of_read_roof"]]
    for x in every:
        least_ = BANDWIDTH.get(x["variant"])
        if least_ and x["impl"] == "triton" and x["context"] == 32768 and x["batch"] == 8:
            what = f"decode_step, {x['model']} 32768x8, {x['variant']} bits: of the bandwidth"
            yield _of(x) | {"aim": what, "bound": f">= {least_}", "value": x["of_read_roof"],
                            "met": float(x["of_read_roof"]) >= least_}  # fmt: skip


TABLES = {
    "aims.csv": aims, "failures.csv": failures, "probes.csv": probes, "tests.csv": tests,
    "decode.csv": decoded, "prompts.csv": prompts, "search.csv": searched,
    "attention.csv": attention, "patterns.csv": patterns, "counters.csv": counters,
}  # fmt: skip


def _of(row: Row, *names: str) -> Row:
    return {k: row.get(k, "") for k in (*MACHINE, *names)}


def _ms(row: Row, factor: float = 1.0, unit: str = "ms") -> Row:
    names = (f"{unit}_least", unit, f"{unit}_most")
    return {k: _short(x * factor) for k, x in zip(names, row["ms"], strict=True)}


def _times(row: Row, every: Sequence[Row], same: Sequence[str], cache: str, way: str = "") -> str:
    """How many times as fast a row is as another cache in the same cell; '' where there is none."""
    other = [
        x["ms"][1] for x in every
        if x["cache"] == cache and (not way or x["way"] == way)
        and all(x[k] == row[k] for k in ("gpu", *same))
    ]  # fmt: skip
    return _short(other[-1] / row["ms"][1]) if other else ""


def _short(x: float) -> str:
    return f"{x:.4g}"


def text(rows: Sequence[Row]) -> str:
    """Short tables for people."""
    said, known = list[str](), latest(rows)
    for row in rows:
        if "about" in row:
            a = row["about"]
            said.append(f"{row['session']}: {a['gpu']}, driver {a['driver']}, torch {a['torch']}, "
                        f"triton {a['triton']}, transformers {a['transformers']}, "
                        f"commit {a['commit']}")  # fmt: skip
    for name, table in TABLES.items():
        found = table(known)
        if name == "counters.csv" or not found:
            continue
        shown = [{k: v for k, v in x.items() if k not in MACHINE[1:]} for x in found]
        said += ["", f"{name}: {len(found)} rows", " | ".join(shown[0])]
        if name == "probes.csv":
            shown = [x for x in shown if x["result"] != "right"]
        said += [" | ".join(str(v)[:120] for v in x.values()) for x in shown[:60]]
    return "\n".join(said) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Write every table that has rows."""
    parser = argparse.ArgumentParser(description="Tables of a quarter of an hour on a GPU.")
    parser.add_argument("--out", type=Path, default=HERE)
    out: Path = parser.parse_args(argv).out
    known: list[Row] = []
    for path in [HERE / "records.jsonl", *sorted(HERE.glob("records/*.jsonl"))]:
        rows = lines(path)
        if any(row["about"]["stand_in"] for row in rows if "about" in row):
            raise SystemExit(
                f"{path} has times of a CPU that stood in for a GPU; they are no figures"
            )
        known += latest(rows)
    if not known:
        raise SystemExit(f"there are no records beside {HERE / 'derive.py'}")
    for name, table in TABLES.items():
        if found := table(known):
            with (out / name).open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, found[0], lineterminator="\n")
                writer.writeheader()
                writer.writerows(found)


if __name__ == "__main__":
    main()
