"""The comparison again on a surrogate that is fitted to all records: more seeds, longer runs.

The surrogate maps a policy to its mean loss over the full cache, and a prefix to a share of it. It
is a Gaussian process on kvei's own features, which favours kvei; the table of live runs is without
that advantage. Each window has noise as it was measured (`noise.py`), another draw for every seed,
and blocks vary within it with the standard deviation among policies of like loss. Hypervolumes are
of the reported sets, with the surrogate's noise-free losses. It was fitted once,
to the runs named in `records/surrogate.json`, and is stored there, so that all contenders use the
same one. Those runs are not of the present kvei.

    python simulate.py --sampler kvei --seeds 1-20 --trials 60 --place /tmp/sim
    python simulate.py --set EXPLORATION_WEIGHT=1 ...  # another constant of kvei
    python simulate.py --set next_move=none ...        # without one-at-a-time screening
    python simulate.py --grow 8 --trials 65 --seeds 1-8 --fleet --evaluators 64  # side by side
    python simulate.py --held-out            # error on records that it was not fitted to
    python simulate.py --fit                 # fit it anew
"""

import argparse
import heapq
import json
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from kept import RECORDS, kept_policies, surrogate_runs
from noise import Noise

from kvsearch.policy import ModelShape, Policy
from kvsearch.policy_search.admission import Task, baselines
from kvsearch.policy_search.driver import Search
from kvsearch.policy_search.fidelity import most_measured
from kvsearch.policy_search.samplers import kvei, make_sampler
from kvsearch.policy_search.samplers.gp import GP, fit, process
from kvsearch.policy_search.worker import Job, Outcome, attempt
from kvsearch.policy_space import Setting
from kvsearch.policy_space import load as load_space
from kvsearch.policy_space.features import features, names_for
from kvsearch.results.folder import RunFolder
from kvsearch.results.measurement import Measurement
from kvsearch.results.pareto import FLOOR, front
from kvsearch.results.pareto import log_hypervolume as volume
from kvsearch.results.records import Trial

NAMES = names_for(load_space(str(Path(__file__).with_name("space.yaml"))))
HERE = Path(__file__).parent
CONTEXT, WINDOWS, BUDGET, BLOCK = 1024, 2, 128, 64
AT = (17, 20, 30, 40, 60, 80, 100, 120, 160, 200, 240)  # evaluated policies


class Truth:
    """Losses of the records, and a Gaussian process through them: the stored one or a new one."""

    def __init__(self, keep: np.ndarray | None = None) -> None:
        about = json.loads((RECORDS / "about.json").read_text())
        self.shape = ModelShape(**about["shape"])
        self.setting = Setting(self.shape, about["budget_bytes"], CONTEXT)
        sums = {
            r["fingerprint"]: np.asarray(r["sums"])
            for r in pq.read_table(RECORDS / "blocks.parquet").to_pylist()
            if r["part"] == "search"
        }
        self.full = sums.pop(about["full"]) / BLOCK  # nats per token of each block
        policies = kept_policies()
        trials = pq.read_table(RECORDS / "trials.parquet").to_pylist()
        runs = surrogate_runs()
        others = {t["fingerprint"] for t in trials if t["run"] in runs}
        self.keys = sorted(k for k in sums if policies[k].slots is not None and k in others)
        self.policies = [policies[k] for k in self.keys]
        self.blocks = np.stack([sums[k] / BLOCK - self.full for k in self.keys])
        self.x = np.array([self._features(p) for p in self.policies])
        self.y = np.log10(np.maximum(self.blocks.mean(1), 0) + FLOOR)
        rows = np.arange(len(self.keys)) if keep is None else keep
        self.gp = self._kept() if keep is None else self.fitted(rows)
        level = np.maximum(self.blocks.mean(1, keepdims=True), FLOOR)
        spread = (self.blocks / level - (self.blocks / level).mean(0))[rows]
        profile = (self.blocks / level)[rows].mean(0).reshape(WINDOWS, -1)
        self.profile = profile / profile.mean(1, keepdims=True)  # of a window's loss
        self.noise = spread.std(0).reshape(WINDOWS, -1)

    def fitted(self, rows: np.ndarray) -> GP:
        """A process fitted to these records."""
        return fit(self.x[rows], self.y[rows], np.zeros(len(rows)))

    def windows(self) -> tuple[np.ndarray, np.ndarray]:
        """Losses `[policies, 4]` on two search and two report windows, and features."""
        rows = pq.read_table(RECORDS / "blocks.parquet").to_pylist()
        about, policies = json.loads((RECORDS / "about.json").read_text()), kept_policies()
        sums = {
            (r["part"], r["fingerprint"]): np.reshape(r["sums"], (WINDOWS, -1)).mean(1) / BLOCK
            for r in rows
        }
        both = [k for p, k in sums if p == "report" and ("search", k) in sums and k in policies]
        both = sorted(k for k in both if policies[k].slots is not None)
        losses = [
            np.concatenate([sums[p, k] - sums[p, about["full"]] for p in ("search", "report")])
            for k in both
        ]
        return np.array(losses), np.array([self._features(policies[k]) for k in both])

    def _kept(self) -> GP:
        """The process of `records/surrogate.json` through all records."""
        kept = json.loads((RECORDS / "surrogate.json").read_text())["process"]
        z = (self.y - kept["centre"]) / kept["unit"]
        noise = np.full(len(z), kept["noise"])
        lengths = np.array(kept["lengths"])
        return process(self.x, z, noise, lengths, kept["scale"], kept["centre"], kept["unit"])

    def _features(self, policy: Policy) -> tuple[float, ...]:
        return features(policy, self.setting, NAMES)

    def dnll(self, policies: list[Policy]) -> np.ndarray:
        """True mean loss over the full cache, nats per token."""
        x = np.array([self._features(p) for p in policies])
        return 10 ** self.gp.posterior(x)[0] - FLOOR


class Simulated:
    """A session with the losses of the surrogate and the token counts of a real one."""

    def __init__(self, truth: Truth, seed: int, windows: int) -> None:
        self.truth, self.windows = truth, windows
        self.last: tuple[str, int] = ("", 0)
        self.seen = 0
        self.text = Noise(len(NAMES), seed)

    def run(self, job: Job) -> Measurement:
        key = job.policy.fingerprint(self.truth.shape.layers)
        last = self.windows if job.windows is None else job.first + job.windows
        nll = np.zeros((last - job.first, CONTEXT - 1), dtype=np.float32)
        nll[:, BUDGET - 1 :] = [
            np.repeat(self._blocks(job.policy, int(key, 16) % 2**32, w), BLOCK)
            for w in range(job.first, last)
        ]
        if self.last != (key, job.first):
            self.last, self.seen = (key, job.first), 0
        tokens, self.seen = len(nll) * CONTEXT - self.seen, len(nll) * CONTEXT
        return Measurement(nll, tokens)

    def _blocks(self, policy: Policy, number: int, w: int) -> np.ndarray:
        """Nats per token of each block of a window; windows beyond the records repeat theirs."""
        t, like = self.truth, w % WINDOWS
        full = t.full.reshape(WINDOWS, -1)[like]
        if policy.slots is None:
            return full
        mean = float(t.dnll([policy])[0])
        loss = self.text.loss(mean, np.array(t._features(policy)), number, w)
        noise = np.random.default_rng([number, w]).standard_normal(len(full)) * t.noise[like]
        return full + loss * t.profile[like] + max(mean, FLOOR) * (noise - noise.mean())

    def forget(self) -> None:
        pass


class Fleet:
    """Evaluators that work side by side; a job takes as long as it has tokens.

    Args:
        session: what answers.
        slots: how many evaluators there are.

    Attributes:
        now: tokens that one evaluator has had time for.
        worked: tokens of all of them.
    """

    def __init__(self, session: Simulated, slots: int) -> None:
        self.session, self.slots, self.now, self.worked = session, slots, 0.0, 0.0
        self._ends: list[tuple[float, int, Outcome]] = []

    def open(self) -> None:
        """They are."""

    def submit(self, slot: int, job: Job) -> None:
        """Its answer comes after its tokens, of equal ones that of the lower slot first."""
        outcome = attempt(self.session, job)
        assert outcome.measured is not None
        self.worked += outcome.measured.tokens
        heapq.heappush(self._ends, (self.now + outcome.measured.tokens, slot, outcome))

    def wait(self) -> tuple[int, Outcome]:
        """The next answer."""
        self.now, slot, outcome = heapq.heappop(self._ends)
        return slot, outcome

    def close(self) -> None:
        """Nothing to stop."""


def simulate(truth: Truth, o: argparse.Namespace, seed: int) -> list[dict]:
    """One run; a row per checkpoint."""
    space = load_space(str(Path(__file__).with_name("space.yaml")))
    methods = 0 if o.cold else len(baselines())
    task = Task(
        truth.setting, BUDGET, space, o.trials - methods, seed,
        make_sampler(o.sampler, space, truth.setting), o.grow or WINDOWS,
        warm_start=not o.cold, racing=not o.no_race, growing=bool(o.grow),
    )  # fmt: skip
    how = f"grow{o.grow}" if o.grow else "full" if o.no_race else "race"
    name = f"{o.sampler}-{'cold' if o.cold else 'warm'}-{how}"
    name += "".join(f"-{s}" for s in o.set)
    name += f"-{o.evaluators}-evaluators" if o.evaluators > 1 else ""
    folder = RunFolder(o.place / f"{name}-{seed}")
    fleet, start = Fleet(Simulated(truth, seed, task.windows), o.evaluators), time.process_time()
    try:
        trials = Search(task, fleet, folder, lambda *_: None).run()
    finally:
        folder.close()
    spent = time.process_time() - start
    rows, paid = [], 0
    for i, t in enumerate(trials, start=1):
        paid += t.state in ("complete", "pruned", "failed")
        if t.state in ("complete", "pruned", "failed") and paid in AT and not o.grow:
            row = {"contender": name, "seed": seed, "evaluated": paid}
            rows.append({**row, **at(truth, trials[:i])})
    # growing windows: tokens and losses are those of the end
    end = {"contender": name, "seed": seed, "evaluated": paid, **at(truth, trials)}
    if o.evaluators > 1 or o.fleet:
        busy = fleet.worked / (fleet.now * fleet.slots)
        return [{**end, "time": fleet.now, "busy": busy, "driver_s": spent / o.trials}]
    return [end] if o.grow else rows


def at(truth: Truth, trials: list[Trial]) -> dict:
    """Tokens so far, and the noise-free hypervolume of the set that would be reported."""
    done = most_measured([t for t in trials if t.state == "complete"])
    kept = [done[i] for i in front([(float(t.bytes_peak or 0), t.dnll or 0.0) for t in done])]
    values = truth.dnll([t.policy for t in kept]) if kept else []
    points = [(float(t.bytes_peak or 0), float(d)) for t, d in zip(kept, values, strict=True)]
    return {
        "tokens": sum(t.tokens for t in trials),
        "volume": volume(points, float(truth.setting.budget_bytes or 0)),
    }


def _ranks(x: np.ndarray) -> np.ndarray:
    return np.argsort(np.argsort(x))


def held_out() -> None:
    """Ten-fold error of the surrogate, in decades of loss."""
    truth, rng = Truth(), np.random.default_rng(0)
    order = rng.permutation(len(truth.keys))
    errors = np.zeros(len(order))
    for fold in range(10):
        out = order[fold::10]
        fitted = Truth(np.setdiff1d(order, out))
        errors[out] = fitted.gp.posterior(truth.x[out])[0] - truth.y[out]
    y = truth.y
    found = {
        "records": len(y),
        "rmse_decades": float(np.sqrt((errors**2).mean())),
        "explained": float(1 - (errors**2).mean() / y.var()),
        "rank_correlation": float(np.corrcoef(_ranks(y), _ranks(y + errors))[0, 1]),
    }
    keep("held_out", found)


def refit() -> None:
    """Fit the surrogate anew to all of its records."""
    truth = Truth()
    gp = truth.fitted(np.arange(len(truth.keys)))
    keep("process", {
        "lengths": gp.lengths.tolist(), "scale": gp.scale, "noise": float(gp.noise[0]),
        "centre": gp.centre, "unit": gp.unit,
    })  # fmt: skip


def keep(what: str, found: dict) -> None:
    """Add a result about the surrogate to its file."""
    file = RECORDS / "surrogate.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), what: found}, indent=1) + "\n")
    print(json.dumps(found))


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--sampler", default="kvei")
    ask.add_argument("--seeds", default="1-20")
    ask.add_argument("--trials", type=int, default=60)
    ask.add_argument("--cold", action="store_true")
    ask.add_argument("--no-race", action="store_true")
    ask.add_argument("--grow", type=int, default=0, help="most windows, of growing ones")
    ask.add_argument("--evaluators", type=int, default=1, help="that work side by side")
    ask.add_argument("--fleet", action="store_true", help="time and work, too")
    ask.add_argument("--set", action="append", default=[], help="NAME=VALUE of kvei's module")
    ask.add_argument("--held-out", action="store_true")
    ask.add_argument("--fit", action="store_true")
    ask.add_argument("--place", type=Path, default=Path("/tmp/kvsearch-simulated"))
    o = ask.parse_args()
    if o.held_out or o.fit:
        held_out() if o.held_out else refit()
        return
    for name, value in (s.split("=") for s in o.set):
        assert hasattr(kvei, name), f"kvei has no {name}"
        # a step that is left out, or another constant
        setattr(kvei, name, (lambda *_: None) if value == "none" else json.loads(value))
    truth = Truth()
    low, high = (int(s) for s in o.seeds.split("-"))
    rows = []
    for seed in range(low, high + 1):
        rows += simulate(truth, o, seed)
        print(rows[-1], flush=True)
    name = f"{rows[0]['contender']}-{o.seeds}"
    place = RECORDS / ("noisy" if len(rows[0]) < 6 else "side-by-side")
    place.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), place / f"{name}.parquet", compression="zstd")


if __name__ == "__main__":
    main()
