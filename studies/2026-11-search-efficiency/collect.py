"""After the live runs: measure the sets that they would have reported, and write the records.

The set of a run at a checkpoint is the front of its losses on the search text. All sets are
measured on the report text, once; then trials and per-block losses of every policy go into
`records/`. Runs and policies that are there already are kept, so the records can be made in several
sessions; `repeats.csv` has the differences of losses between machines.

    python collect.py --place /tmp/bench --data ../shared/data
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from derive import checkpoints
from live import BUDGET, opened, remembering

from kvsearch.policy import Policy
from kvsearch.policy_search.worker import Job
from kvsearch.policy_space import Setting
from kvsearch.results.journal import Journal
from kvsearch.results.pareto import front
from kvsearch.results.records import Trial
from kvsearch.session.progress import Shown

BLOCK = 64  # tokens
HERE = Path(__file__).parent


def reported(trials: list[Trial]) -> list[Trial]:
    """The front by search values: what a run that ended here would report."""
    done = [t for t in trials if t.state == "complete"]
    return [done[i] for i in front([(float(t.bytes_peak or 0), t.dnll or 0.0) for t in done])]


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--place", type=Path, required=True)
    ask.add_argument("--data", type=Path, required=True)
    ask.add_argument("--records", type=Path, default=HERE / "records")
    ask.add_argument("--only", default="", help="runs whose name contains this")
    o = ask.parse_args()
    runs = {p.parent.name: Journal(p).read() for p in sorted(o.place.glob("runs/*/trials.jsonl"))}
    runs = {k: v for k, v in runs.items() if o.only in k}
    raw = o.data / "wikitext2-test.raw"
    loaded, parts, setting = opened(Shown(quiet=True), (f"{raw}:0-900000", f"{raw}:900000-"))
    layers = loaded.shape.layers
    memory = o.place / "memory"
    session = remembering(loaded, parts, o.place)
    wanted = dict[str, Policy]()
    for trials in runs.values():
        for count in checkpoints([t.tokens for t in trials]).values():
            wanted |= {t.fingerprint: t.policy for t in reported(trials[:count])}
    there = measured(o.records)
    wanted = {k: p for k, p in wanted.items() if ("report", k) not in there}
    if ("report", full := Policy().fingerprint(layers)) not in there:
        wanted[full] = Policy()
    for i, (key, policy) in enumerate(wanted.items(), start=1):
        session.run(Job(i, "report", policy))
        print(f"report text {i}/{len(wanted)} {key}", flush=True)
    if ("search", full) not in there:
        session.run(Job(0, "search", Policy()))
    keep(runs, memory, o.records, setting)


def measured(records: Path) -> dict[tuple[str, str], list[float]]:
    """Sums per block by part and fingerprint, as far as they are in the records."""
    file = records / "blocks.parquet"
    rows = pq.read_table(file).to_pylist() if file.exists() else []
    return {(r["part"], r["fingerprint"]): r["sums"] for r in rows}


def keep(runs: dict[str, list[Trial]], memory: Path, records: Path, setting: Setting) -> None:
    """Write `trials.parquet`, `blocks.parquet`, `policies.parquet` and `about.json`."""
    records.mkdir(parents=True, exist_ok=True)
    columns = ("number", "name", "kind", "state", "fingerprint", "bytes_peak", "dnll", "tokens")
    rows = [
        {"run": run, **{c: getattr(t, c) for c in columns}, "rungs": json.dumps(t.rungs)}
        for run, trials in runs.items()
        for t in trials
    ]
    if (file := records / "trials.parquet").exists():
        rows = [r for r in pq.read_table(file).to_pylist() if r["run"] not in runs] + rows
    rows.sort(key=lambda r: (r["run"], r["number"]))
    pq.write_table(pa.Table.from_pylist(rows), file, compression="zstd")
    used = {r["fingerprint"] for r in rows} | {Policy().fingerprint(setting.shape.layers)}
    blocks, policies = measured(records), {}
    if blocks:
        known = pq.read_table(records / "policies.parquet").to_pylist()
        policies = {r["key"]: r["policy"] for r in known}
    for file in sorted(memory.glob("*.npy")):
        part, key = file.stem.split("-")
        if key in used and (part, key) not in blocks:  # those of the surrogate's fit stay
            nll = np.load(file).astype(np.float64)[:, BUDGET - 1 :]  # scored tokens only
            sums = np.add.reduceat(nll, np.arange(0, nll.shape[1], BLOCK), axis=1)
            blocks[part, key] = sums.ravel().tolist()
            policies[key] = json.dumps(json.loads((memory / f"{key}.json").read_text()))
    table = pa.Table.from_pylist(
        [{"part": p, "fingerprint": k, "sums": v} for (p, k), v in sorted(blocks.items())]
    )
    table = table.set_column(2, "sums", table["sums"].cast(pa.list_(pa.float32())))
    pq.write_table(table, records / "blocks.parquet", compression="zstd")
    table = pa.Table.from_pylist([{"key": k, "policy": p} for k, p in sorted(policies.items())])
    pq.write_table(table, records / "policies.parquet", compression="zstd", use_dictionary=False)
    shape = setting.shape
    full = Policy().fingerprint(shape.layers)
    about = {
        "budget_bytes": setting.budget_bytes,
        "block": BLOCK,
        "full": full,
        "shape": asdict(shape),
        "sensitivity": setting.sensitivity,
    }
    (records / "about.json").write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
