"""How much longer an evaluation takes beside other work, with threads that spin and that sleep.

    python studies/2026-11-busy-machine/measure.py [--rounds 3]

Every figure is a process of its own: the real default model evaluates one policy on one window of
the built-in text with all cores, once to warm up and then `--repeat` times; wall seconds of the
fastest. Beside it runs nothing, a Python loop, or the same evaluation without end in another
process with torch's own settings. Waiting threads spin (torch's default), sleep, or spin shortly
and sleep then (what the command line sets). Run it on an idle machine: what else runs is part of
the figures. Rows replace those of the same rival and way in results.csv.
"""

import csv
import io
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import click

from kvsearch.cli import WAITING
from kvsearch.files import write_atomic

HERE = Path(__file__).parent
RIVALS = {
    "nothing": None,
    "a busy loop": ["-c", "while True: pass"],
    "another torch process": [__file__, "--evaluate", "--repeat", "1000000"],
}
SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
WAYS = {"spin": {}, "sleep": {"OMP_WAIT_POLICY": "PASSIVE"}, "spin 1000 times": WAITING}


@click.command()
@click.option("--rounds", default=3, show_default=True)
@click.option("--repeat", default=3, show_default=True)
@click.option("--method", default="xmu", show_default=True)
@click.option("--way", "ways", multiple=True, type=click.Choice(list(WAYS)), help="[default: all]")
@click.option("--evaluate", is_flag=True, hidden=True, help="be the evaluating process")
def main(rounds: int, repeat: int, method: str, ways: tuple[str, ...], evaluate: bool) -> None:
    """Measure in turns and write results.csv."""
    if evaluate:
        timed(method, repeat)
        return
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        for rival, command in RIVALS.items():
            for way in ways or WAYS:
                seconds = beside(command, way, method, repeat)
                found.setdefault((rival, way), []).append(seconds)
                click.echo(f"beside {rival}, threads that {way}: {seconds:.2f} s")
    write(found, method)


def beside(rival: list[str] | None, way: str, method: str, repeat: int) -> float:
    """Seconds of an evaluation beside `rival`."""
    plain = {k: v for k, v in os.environ.items() if k not in SETTINGS}
    other = None if rival is None else subprocess.Popen([sys.executable, *rival], env=plain)
    try:
        if other is not None:
            time.sleep(15 if len(rival or ()) > 2 else 1)  # until its model is loaded
        mine = [sys.executable, __file__, "--evaluate", "--method", method]
        done = subprocess.run(
            [*mine, "--repeat", str(repeat)], env={**plain, **WAYS[way]}, check=True,
            capture_output=True, text=True,
        )  # fmt: skip
        return float(done.stdout.split()[-1])
    finally:
        if other is not None:
            other.kill()
            other.wait()


def timed(method: str, repeat: int) -> None:
    """Evaluate again and again; print the fastest."""
    from kvsearch.evaluation.evaluator import Evaluator
    from kvsearch.models import load_model
    from kvsearch.policy_space import Setting
    from kvsearch.policy_space.methods import at
    from kvsearch.workloads.text import builtin, tokenize, windows

    loaded = load_model(announce=lambda _: None)
    ids = windows(tokenize(loaded.tokenizer, builtin()), count=1, length=1024)
    evaluator = Evaluator(loaded)
    policy = at(method, Setting(loaded.shape, loaded.shape.budget_bytes(256), 1024))
    best = float("inf")
    for i in range(repeat + 1):
        start = time.perf_counter()
        evaluator.quality(policy, ids, resident=False)
        if i:
            best = min(best, time.perf_counter() - start)
    print(best)


def write(found: dict[tuple[str, str], list[float]], method: str) -> None:
    """A row per rival and way: median seconds, and their ratio to those of torch alone."""
    file = HERE / "results.csv"
    rows = {}
    if file.exists():
        rows = {(r["beside"], r["waiting threads"]): r for r in csv.DictReader(file.open())}
    for (rival, way), seconds in found.items():
        rows[rival, way] = {
            "beside": rival, "waiting threads": way, "method": method, "rounds": str(len(seconds)),
            "seconds": f"{statistics.median(seconds):.3f}", "lowest": f"{min(seconds):.3f}",
            "highest": f"{max(seconds):.3f}", "to idle": "", "cores": str(os.cpu_count()),
            "machine": platform.machine(),
        }  # fmt: skip
    for row in rows.values():
        row["to idle"] = f"{float(row['seconds']) / float(rows['nothing', 'spin']['seconds']):.3f}"
    text = io.StringIO()
    out = csv.DictWriter(text, fieldnames=list(next(iter(rows.values()))), lineterminator="\n")
    out.writeheader()
    out.writerows(rows.values())
    write_atomic(file, text.getvalue())


if __name__ == "__main__":
    main()
