"""The GPU's counters for a few launches, as `ncu` reads them.

`python counters.py` makes the launches, in the order that it prints; `counted` runs it under ncu.
"""

import csv
import shutil
import subprocess
import sys
from collections.abc import Iterator

import cases
import compactions
import torch
from pool import Skipped, emit
from timing import device, stands_in

DECODED = ("16", "8", "4", "2", "1", "r4", "r3 scored")
TODO = [
    *(("decode_step", "llama2-7b", 8, 4096, variant) for variant in DECODED),
    *(("decode_step", "llama3-8b", 8, 16384, variant) for variant in ("4", "2")),
    ("lifetime_attention", "llama3-8b", 1, 4096, "full"),
    ("evict_in_place", "llama3-8b", 1, 1024, "64 intervals"),  # two of them
]
SECTIONS = ("SpeedOfLight", "SchedulerStats", "WarpStateStats", "MemoryWorkloadAnalysis",
            "LaunchStats", "Occupancy")  # fmt: skip
KERNELS = "regex:attend|evict"
MARK = "launched "


def counted() -> None:
    """Read counters of every launch; a row for each kernel."""
    if shutil.which("ncu") is None:
        raise Skipped("ncu is not on the PATH")
    command = ["ncu", "--clock-control", "none", "--profile-from-start", "off", "-k", KERNELS]
    command += [x for section in SECTIONS for x in ("--section", section)]
    command += ["--csv", "--page", "details", sys.executable, __file__]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stderr[-4000:], flush=True)
    rows = list(kernels(done.stdout))
    for row in rows:
        emit(**row)
    if done.returncode or not rows:
        last = (done.stdout + done.stderr).strip().splitlines()[-1:] or ["it printed nothing"]
        raise RuntimeError(f"ncu ended with code {done.returncode}: {last[0]}")


def kernels(text: str) -> Iterator[dict[str, object]]:
    """Metrics of each kernel of ncu's table, with the launches that were printed."""
    lines = text.splitlines()
    labels = [x.removeprefix(MARK) for x in lines if x.startswith(MARK)]
    table = csv.DictReader(x for x in lines if x.startswith('"'))
    found: dict[str, dict[str, object]] = {}
    for row in table:
        one = found.setdefault(row["ID"], {"kernel": row["Kernel Name"], "metrics": {}})
        metrics = one["metrics"]
        assert isinstance(metrics, dict)
        if row["Metric Name"]:
            metrics[f"{row['Metric Name']}, {row['Metric Unit']}"] = row["Metric Value"]
    for number, one in enumerate(found.values()):
        yield {"number": number, "launches": labels, **one}


def main() -> None:
    """Launch each kernel once, where a profiler listens to nothing else."""
    compactions.INTERVALS = 2
    heads = {model.name: model for model in cases.MODELS}
    for op, model, batch, context, variant in TODO:
        case = cases.Case(op, heads[model], batch, context, variant)
        kind = torch.float32 if stands_in() else torch.bfloat16
        work = cases.build(case, str(device()), 0, tiny=stands_in(), dtype=kind)
        if stands_in():
            work.run("reference")()
        else:
            cuda = torch.cuda.cudart()
            torch.cuda.synchronize()
            cuda.cudaProfilerStart()
            work.run("triton")()
            torch.cuda.synchronize()
            cuda.cudaProfilerStop()
        print(f"{MARK}{case.label}", flush=True)


if __name__ == "__main__":
    main()
