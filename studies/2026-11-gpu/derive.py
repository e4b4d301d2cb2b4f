"""results.csv, checks.csv, tiles.csv and search.csv of what was kept of an H200.

    python derive.py --out FOLDER

A row of results.csv is one op at one shape: microseconds, its share of the read bandwidth that was
measured in the same run, and how many times as fast it is as torch's SDPA over as many slots in 16
bits, in the same run. checks.csv has what the tests of `tests/gpu` said, in one line per test and
type. tiles.csv has how much longer a setting of `decode_attention` took than the fastest one of its
run, geometric means over variants and shapes. search.csv has losses of the same policies, on the
same windows, on this GPU and on a CPU (`../2026-11-first-command`).
"""

import argparse
import csv
import json
import re
from collections import defaultdict
from pathlib import Path
from statistics import geometric_mean

HERE = Path(__file__).parent
CPU = HERE.parent / "2026-11-first-command/records/wikitext-1/trials.jsonl"
KEY = ("op", "impl", "model", "batch", "context", "variant")
RUNS = {"first": "kernels.csv", "second": "kernels-2.csv"}
TILES = {"first": "tiles-1.csv", "second": "tiles-2.csv"}
DECODES = ("decode_step", "decode_attention", "scored_decode")


def timed() -> list[dict[str, str]]:
    """Rows of results.csv."""
    return [{"run": run} | row for run, name in RUNS.items() for row in _timed(name)]


def _timed(name: str) -> list[dict[str, str]]:
    found: dict[tuple[str, ...], dict[str, float]] = defaultdict(dict)
    with (HERE / "records" / name).open(newline="") as file:
        for row in csv.DictReader(file):
            if row["unit"]:
                found[tuple(row[k] for k in KEY)][row["metric"]] = float(row["p50"])
    plain = {
        (op in DECODES, *at): ms["time"]
        for (op, impl, *at, variant), ms in found.items()
        if impl == "sdpa" and variant in ("16", "full", "1024")
    }
    rows = []
    for key, numbers in found.items():
        op, _, *at, _ = key
        sdpa = plain.get((op in DECODES, *at))
        attends = op in (*DECODES, "lifetime_attention")
        rows.append(
            dict(zip(KEY, key, strict=True))
            | {
                "us": f"{numbers['time'] * 1e3:.4g}",
                "of_read_roof": f"{numbers['of read roof']:.2f}",
                "times_sdpa": f"{sdpa / numbers['time']:.2f}" if sdpa and attends else "",
            }
        )
    return rows


def checked() -> list[dict[str, str]]:
    """Rows of checks.csv: what was tested, of how many methods, and the worst of all sessions."""
    lines = "".join(p.read_text() for p in sorted(HERE.glob("records/checks-*.txt"))).splitlines()
    worst: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)

    def note(what: str, dtype: str, name: str, off: str | float) -> None:
        found = worst[what, dtype]
        found[name] = max(abs(float(off)), found.get(name, 0.0))

    for line in lines:
        if m := re.match(r"kernels (\S+) torch\.(\w+): off by (\S+),", line):
            note("kernels and references, relative", m[2], m[1], m[3])
        elif m := re.match(r"replay (\S+) torch\.(\w+): most (\S+), mean (\S+),", line):
            note("evaluation and token by token, nats, one token", m[2], m[1], m[3])
            note("evaluation and token by token, nats, mean", m[2], m[1], m[4])
        elif m := re.match(r"evict_in_place (.*): off by (\S+)", line):
            note("one launch for all intervals and turns, relative", "float32", m[1], m[2])
        elif m := re.match(r"launches (.*): \{(.*)\}, counted \{(.*)\}", line):
            real, counted = (dict(re.findall(r"'(\w+)': (\d+)", x)) for x in m.groups()[1:])
            if "step" in real:
                what = "launches of a decoded token, more or fewer than counted"
                note(what, "float16", m[1], int(real["step"]) - int(counted["step"]))
    return [
        {"what": what, "dtype": dtype, "methods": str(len(x)), "worst": f"{max(x.values()):.2g}"}
        for (what, dtype), x in sorted(worst.items())
    ]


def tiled() -> list[dict[str, str]]:
    """Rows of tiles.csv: the settings of each run, the best first."""
    rows = []
    for run, name in TILES.items():
        took: dict[tuple[str, ...], dict[tuple[str, ...], float]] = defaultdict(dict)
        with (HERE / "records" / name).open(newline="") as file:
            for row in csv.DictReader(file):
                # warps at once, where programs at once were given
                once = row.get("at_once") or str(int(row["resident"]) * int(row["warps"]))
                setting = once, row["columns"], row["warps"], row["stages"]
                case = row["variant"], row["model"], row["batch"], row["slots"]
                took[setting][case] = float(row["us"])
        best = {c: min(x[c] for x in took.values() if c in x) for x in took.values() for c in x}
        full = {s: x for s, x in took.items() if len(x) == len(best)}
        longer = {s: geometric_mean(x[c] / best[c] for c in best) for s, x in full.items()}
        for setting in sorted(longer, key=lambda s: longer[s]):
            named = dict(zip(("warps_at_once", "keys", "warps", "stages"), setting, strict=True))
            rows.append({"run": run} | named | {"times_the_fastest": f"{longer[setting]:.3f}"})
    return rows


def searched() -> list[dict[str, str]]:
    """Rows of search.csv: policies that a GPU and a CPU measured on as many windows."""
    on = []
    for path in (HERE / "records/search.jsonl", CPU):
        trials = map(json.loads, path.read_text().splitlines())
        on.append({t["fingerprint"]: t for t in trials if t["dnll"] is not None})
    gpu, cpu = on
    return [
        {
            "policy": t["name"],
            "windows": str(t["windows"]),
            "dnll_gpu": f"{t['dnll']:.4f}",
            "dnll_cpu": f"{cpu[x]['dnll']:.4f}",
            "seconds_gpu": f"{t['seconds']:.2f}",
            "seconds_cpu": f"{cpu[x]['seconds']:.2f}",
        }
        for x, t in gpu.items()
        if x in cpu and cpu[x]["windows"] == t["windows"]
    ]


def main() -> None:
    """Write all tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=HERE)
    out: Path = parser.parse_args().out
    tables = {
        "results.csv": timed(), "checks.csv": checked(), "tiles.csv": tiled(),
        "search.csv": searched(),
    }  # fmt: skip
    for name, rows in tables.items():
        with (out / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
