"""results.csv and checks.csv of what was kept of an H200.

    python derive.py --out FOLDER

A row of results.csv is one op at one shape: microseconds, its share of the read bandwidth that was
measured in the same run, and how many times as fast it is as torch's SDPA over as many slots in 16
bits. checks.csv has what the tests of `tests/gpu` said, in one line per test and type.
"""

import argparse
import csv
import re
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).parent
KEY = ("op", "impl", "model", "batch", "context", "variant")
COLUMNS = (*KEY, "us", "of_read_roof", "times_sdpa")
DECODES = ("decode_step", "decode_attention", "scored_decode")


def timed() -> list[dict[str, str]]:
    """Rows of results.csv."""
    found: dict[tuple[str, ...], dict[str, float]] = defaultdict(dict)
    with (HERE / "records/kernels.csv").open(newline="") as file:
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
    """Rows of checks.csv: what was tested, how many times, and the worst of it."""
    lines = "".join(p.read_text() for p in sorted(HERE.glob("records/checks-*.txt"))).splitlines()
    worst: dict[tuple[str, str], list[float]] = defaultdict(list)
    for line in lines:
        if m := re.match(r"kernels \S+ torch\.(\w+): off by (\S+),", line):
            worst["kernels and references, relative", m[1]].append(float(m[2]))
        elif m := re.match(r"replay \S+ torch\.(\w+): most (\S+), mean (\S+),", line):
            worst["evaluation and token by token, nats, one token", m[1]].append(float(m[2]))
            worst["evaluation and token by token, nats, mean", m[1]].append(abs(float(m[3])))
        elif m := re.match(r"launches .*: \{(.*)\}, counted \{(.*)\}", line):
            real, counted = (dict(re.findall(r"'(\w+)': (\d+)", x)) for x in m.groups())
            if "step" in real:
                off = abs(int(real["step"]) - int(counted["step"]))
                worst["launches of a decoded token, more or fewer than counted", "float16"].append(
                    off
                )
    return [
        {"what": what, "dtype": dtype, "methods": str(len(x)), "worst": f"{max(x):.2g}"}
        for (what, dtype), x in sorted(worst.items())
    ]


def main() -> None:
    """Write both tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=HERE)
    out: Path = parser.parse_args().out
    for name, rows in (("results.csv", timed()), ("checks.csv", checked())):
        with (out / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
