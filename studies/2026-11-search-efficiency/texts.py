"""The same search on other texts, which share no steps; seeds of warm runs share their first ones.

Layer sensitivity is measured on each text, as `kvsearch run` does for as many trials. The policies
that the run would have reported are measured on report text at the end. `records/texts/` gets one
file per run, and the layer sensitivity (`*-harm.json`).

    python texts.py --text wiki1 --sampler kvei --place /tmp/texts --data ../shared/data
"""

import argparse
import json
from pathlib import Path

from collect import reported
from derive import checkpoints
from live import BUDGET, CONTEXT, WINDOWS, opened, remembering, search

from kvsearch.evaluation import sensitivity
from kvsearch.evaluation.evaluator import Evaluator
from kvsearch.models.load import LoadedModel
from kvsearch.policy import Policy
from kvsearch.policy_search.admission import Task, baselines
from kvsearch.policy_search.samplers import make_sampler
from kvsearch.policy_search.worker import Job
from kvsearch.policy_space import Setting
from kvsearch.policy_space import load as load_space
from kvsearch.session.make_windows import MeasuredOn
from kvsearch.session.progress import Shown

HERE = Path(__file__).parent
WIKI, SOTU = "wikitext2-test.raw", "sotu.txt"
TEXTS = {  # search text, report text; the windows of the first differ from those of `live.py`
    "wiki1": (f"{WIKI}:150000-400000", f"{WIKI}:900000-"),
    "wiki2": (f"{WIKI}:400000-650000", f"{WIKI}:900000-"),
    "wiki3": (f"{WIKI}:650000-900000", f"{WIKI}:900000-"),
    "sotu1": (f"{SOTU}:0-600000", f"{SOTU}:2000000-"),
    "sotu2": (f"{SOTU}:600000-1200000", f"{SOTU}:2000000-"),
    "sotu3": (f"{SOTU}:1200000-1800000", f"{SOTU}:2000000-"),
}


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--text", choices=TEXTS, required=True)
    ask.add_argument("--sampler", default="kvei")
    ask.add_argument("--trials", type=int, default=60, help="evaluated policies, methods included")
    ask.add_argument("--place", type=Path, required=True, help="folder of runs and memory")
    ask.add_argument("--data", type=Path, required=True, help="folder with the texts")
    ask.add_argument("--records", type=Path, default=HERE / "records" / "texts")
    o = ask.parse_args()
    here, there = (f"{o.data}/{spec}" for spec in TEXTS[o.text])
    loaded, parts, setting = opened(Shown(quiet=True), (here, there))
    setting = Setting(setting.shape, setting.budget_bytes, CONTEXT, per_layer(o, loaded, parts))
    session = remembering(loaded, parts, o.place / o.text)
    space = load_space(str(HERE / "space.yaml"))
    free = o.trials - len(baselines(True))
    sampler = make_sampler(o.sampler, space, setting)
    task = Task(setting, BUDGET, space, free, 1, sampler, WINDOWS, warm_start=True, racing=True)
    trials = search(task, session, o.place / o.text / "runs" / o.sampler)
    full = session.run(Job(0, "report", Policy())).nll[:, BUDGET - 1 :]
    found: dict[str, float] = {}
    for count in checkpoints([t.tokens for t in trials]).values():
        for t in reported(trials[:count]):
            if t.fingerprint not in found:
                nll = session.run(Job(0, "report", t.policy)).nll[:, BUDGET - 1 :]
                found[t.fingerprint] = float((nll - full).mean())
    keys = ("name", "state", "fingerprint", "bytes_peak", "dnll", "tokens")
    rows = [{k: getattr(t, k) for k in keys} for t in trials]
    lines = [json.dumps({**r, "report": found.get(r["fingerprint"])}) for r in rows]
    o.records.mkdir(parents=True, exist_ok=True)
    (o.records / f"{o.text}-{o.sampler}.jsonl").write_text("\n".join(lines) + "\n")
    (o.records / f"{o.text}-harm.json").write_text(json.dumps(setting.sensitivity) + "\n")


def per_layer(o: argparse.Namespace, loaded: LoadedModel, parts: MeasuredOn) -> tuple[float, ...]:
    """Layer sensitivity on this text, measured once for all samplers."""
    file = o.place / o.text / "harm.json"
    if not file.exists():
        windows = parts.parts["search"].beginnings
        plan = sensitivity.plan(o.trials * windows.size, loaded.shape.layers, CONTEXT)
        part = windows[: plan.windows, : plan.tokens]
        found = sensitivity.measure(Evaluator(loaded), part, groups=plan.groups)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found))
    return tuple(json.loads(file.read_text()))


if __name__ == "__main__":
    main()
