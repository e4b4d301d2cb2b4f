"""One live search run of the benchmark, on the real model.

All runs share a store of measured policies, so a policy that two runs propose is evaluated once;
each run is charged the tokens that it would have evaluated alone.

    python live.py --sampler kvei --seed 1 --trials 60 --place /tmp/bench
"""

import argparse
import json
import os
from pathlib import Path

import numpy as np

from kvsearch.evaluation.evaluator import Evaluator
from kvsearch.models.load import LoadedModel, load_model
from kvsearch.policy_search.admission import Task, baselines
from kvsearch.policy_search.driver import Search
from kvsearch.policy_search.executors.inline import Inline
from kvsearch.policy_search.model_worker import ModelSession
from kvsearch.policy_search.samplers import make_sampler
from kvsearch.policy_search.worker import Job
from kvsearch.policy_space import Setting
from kvsearch.policy_space import load as load_space
from kvsearch.results.folder import RunFolder
from kvsearch.results.measurement import Measurement
from kvsearch.results.pareto import log_hypervolume as volume
from kvsearch.results.records import Trial
from kvsearch.session.make_windows import MeasuredOn, TextOptions, text
from kvsearch.session.progress import Shown

BUDGET, CONTEXT, WINDOWS = 128, 1024, 2
RECORDS = Path(__file__).with_name("records")


class Remembered:
    """A session that reads the shared store first, and charges the tokens of a run without it."""

    def __init__(self, inner: ModelSession, place: Path, layers: int) -> None:
        self.inner, self.place, self.layers = inner, place, layers
        self.last, self.paid = "", [0]
        place.mkdir(parents=True, exist_ok=True)

    def run(self, job: Job) -> Measurement:
        key = job.policy.fingerprint(self.layers)
        W, T = self.inner.parts[job.part].shape
        file = self.place / f"{job.part}-{key}.npy"
        if not file.exists():
            whole = Job(job.key, job.part, job.policy)
            draft = file.with_suffix(f".{os.getpid()}.tmp")
            with draft.open("wb") as f:
                np.save(f, self.inner.run(whole).nll)
            (self.place / f"{key}.json").write_text(job.policy.to_json())
            os.replace(draft, file)
        windows = W if job.windows is None else job.windows
        if self.last != key:
            self.last, self.paid = key, [0] * W
        tokens = sum(T for p in self.paid[:windows] if p < T)
        self.paid[:windows] = [T] * windows
        return Measurement(np.load(file)[:windows], tokens)

    def forget(self) -> None:
        self.inner.forget()


def opened(shown: Shown, files: tuple[str, ...], sensitivity: str = "about"):
    """Model, text and setting of the benchmark.

    Args:
        shown: for progress.
        files: search text and report text.
        sensitivity: record with the layer sensitivity. `about` has that of the first runs, a rise
            in NLL, so that equal knobs are equal policies; `divergence` has the KL divergence that
            `kvsearch run` measures for a search of 60 policies.
    """
    loaded = load_model(announce=shown.say)
    options = TextOptions((files[0],), None, (files[1],), CONTEXT, WINDOWS, WINDOWS)
    parts = text(loaded, options, shown.say)
    shape = loaded.shape
    found = tuple(json.loads((RECORDS / f"{sensitivity}.json").read_text())["sensitivity"])
    return loaded, parts, Setting(shape, shape.budget_bytes(BUDGET), CONTEXT, found)


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--sampler", default="kvei")
    ask.add_argument("--seed", type=int, default=1)
    ask.add_argument("--trials", type=int, default=60, help="evaluated policies, methods included")
    ask.add_argument("--cold", action="store_true")
    ask.add_argument("--no-race", action="store_true")
    ask.add_argument(
        "--divergence", action="store_true", help="layer sensitivity as a KL divergence"
    )
    ask.add_argument("--place", type=Path, required=True, help="folder of runs and memory")
    ask.add_argument("--data", type=Path, required=True, help="folder with wikitext2-test.raw")
    o = ask.parse_args()
    shown = Shown(quiet=True)
    raw = o.data / "wikitext2-test.raw"
    sensitivity = "divergence" if o.divergence else "about"
    loaded, parts, setting = opened(shown, (f"{raw}:0-900000", f"{raw}:900000-"), sensitivity)
    name = o.sampler + "_kl" * o.divergence
    name += f"-{'cold' if o.cold else 'warm'}-{'full' if o.no_race else 'race'}-{o.seed}"
    session = remembering(loaded, parts, o.place)
    methods = len(baselines(not o.cold))
    space = load_space(str(Path(__file__).with_name("space.yaml")))
    sampler = make_sampler(o.sampler, space, setting)
    task = Task(
        setting, BUDGET, space, o.trials - methods, o.seed, sampler, WINDOWS,
        warm_start=not o.cold, racing=not o.no_race,
    )  # fmt: skip
    search(task, session, o.place / "runs" / name)


def remembering(loaded: LoadedModel, parts: MeasuredOn, place: Path) -> Remembered:
    """A session of the benchmark, with its store in `place`."""
    inner = ModelSession(Evaluator(loaded, batch=WINDOWS), parts.windows)
    return Remembered(inner, place / "memory", loaded.shape.layers)


def search(task: Task, session: Remembered, place: Path) -> list[Trial]:
    """Run or resume one search in `place`; a line per trial."""

    def watch(trial: Trial, trials: list[Trial]) -> None:
        done = [(t.bytes_peak, t.dnll) for t in trials if t.state == "complete"]
        tokens = sum(t.tokens for t in trials)
        print(
            f"{place.name} {len(trials):>4} {trial.state:<9} {trial.name:<22} tokens {tokens:>7} "
            f"volume {volume(done, task.setting.budget_bytes):.4f}",
            flush=True,
        )

    folder = RunFolder(place)
    try:
        return Search(task, Inline(session), folder, watch).run()
    finally:
        folder.close()


if __name__ == "__main__":
    main()
