"""`--engine tune`: Tune runs the evaluations, the run folder is complete."""

import os
from pathlib import Path

import optuna
import pytest
from conftest import outcomes
from toy import WINDOWS, Session, Toy, task

from kvsearch.policy_search import ray_tune
from kvsearch.policy_search.driver import Search
from kvsearch.policy_search.executors.inline import Inline
from kvsearch.results.folder import RunFolder

pytestmark = pytest.mark.slow  # Ray starts
DONE = {optuna.trial.TrialState.PRUNED, optuna.trial.TrialState.COMPLETE}


def test_tune_fills_the_same_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray.tune")
    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]))
    log, folder = tmp_path / "log", RunFolder(tmp_path / "run")
    bad = Toy(log, 0.0, "nan")

    def search(trials: int) -> Search:
        inline = Inline(Session(Toy(log, 0.0)))
        return Search(
            task(trials, sampler="random", together=WINDOWS), inline, folder, lambda *_: None
        )

    first = search(4)
    trials = ray_tune.run(first, bad, slots=2, address="local")
    failed = [t for t in trials if t.state == "failed"]
    assert failed and all("not finite" in (t.error or "") for t in failed)
    assert sum(t.kind == "searched" and t.state in ("complete", "failed") for t in trials) == 4
    assert {t.state for t in first.study.trials} <= DONE  # nothing is left running
    assert len(list((tmp_path / "run" / "nll").glob("search-*"))) == 1 + sum(
        t.state == "complete" for t in trials
    )
    pids = {line.split()[0] for line in log.read_text().splitlines()}
    assert len(pids) <= 3  # this process and two actors that are used again

    before = outcomes(tmp_path / "run")
    more = search(6).run()  # the other engine goes on in the same folder
    folder.close()
    assert sum(t.kind == "searched" and t.state in ("complete", "failed") for t in more) == 6
    assert [o for o in outcomes(tmp_path / "run") if o in before] == before


def test_tune_starts_policies_on_all_windows(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    search = Search(task(2), Inline(Session(Toy(tmp_path / "log"))), folder, lambda *_: None)
    with pytest.raises(AssertionError):
        ray_tune.run(search, Toy(tmp_path / "log"), slots=1, address="local")
    folder.close()
