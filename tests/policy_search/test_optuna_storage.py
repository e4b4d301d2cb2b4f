"""A run as an Optuna storage: what Optuna reads there is what the run recorded."""

import json
import warnings
from pathlib import Path
from typing import Any

import optuna
import pytest

from kvsearch.results.folder import RunFolder
from tests.command import call

RUN = Path(__file__).resolve().parents[2] / "studies" / "2026-11-outcome" / "b256"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from kvsearch.commands.vectors_and_storage import optuna_storage

    return optuna_storage(RUN, tmp_path_factory.mktemp("optuna") / "study.db")


def test_optuna_reads_every_trial(file: Path) -> None:
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    study = optuna.load_study(study_name=None, storage=f"sqlite:///{file}")
    ours = {t.number: t for t in RunFolder(RUN, write=False).journal.read()}
    numbered = [t for n, t in sorted(ours.items()) if n >= 0]
    assert study.study_name == "b256" and len(study.trials) == len(ours) > 60
    limit = json.loads((RUN / "study.json").read_text())["settings"]["budget_bytes"]
    for mine, theirs in zip(numbered, study.trials, strict=False):
        assert theirs.params == mine.params and theirs.user_attrs["state"] == mine.state
        if theirs.values is None:
            assert mine.state in ("pruned", "rejected", "failed", "running")
            continue
        assert theirs.values[:2] == [mine.dnll, mine.bytes_peak]
        assert (theirs.constraints["fits"] <= 0) == (mine.bytes_peak <= limit)
    best = study.best_trials
    assert best and all(t.constraints["fits"] <= 0 for t in best)
    scored = [t for t in ours.values() if t.state == "complete" and t.dnll is not None]
    lowest = min(t.dnll for t in scored if (t.bytes_peak or 0) <= limit)
    assert min(t.values[0] for t in best) == lowest
    assert study.metric_names == ["dNLL, nats per token", "peak bytes per sequence"]
    optuna.visualization.matplotlib.plot_pareto_front(study)


def test_an_interrupted_run_has_one_too_and_mistakes_write_nothing(
    tmp_path: Path, capsys: Any
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "study.json").write_bytes((RUN / "study.json").read_bytes())
    lines = (RUN / "trials.jsonl").read_bytes().splitlines(keepends=True)
    code, _, err = call(["export", str(run), "--to", "optuna"], capsys)
    assert code == 2 and "holds no trials" in err
    running = next(x for x in lines if b'"state": "running"' in x and b'"number": 3,' in x)
    done = [x for x in lines[:40] if b'"number": 3,' not in x]
    (run / "trials.jsonl").write_bytes(b"".join([*done, running]))
    code, out, _ = call(["export", str(run), "--to", "optuna", "--json"], capsys)
    (written,) = json.loads(out)["files"]
    assert code == 0 and Path(written) == run / "optuna.db"
    study = optuna.load_study(study_name="run", storage=f"sqlite:///{written}")
    assert study.trials[3].state == optuna.trial.TrialState.FAIL
    before = Path(written).read_bytes()
    for argv, part in (
        ([str(run)], "--force"),
        ([str(tmp_path)], "is no run folder"),
        ([str(run), "--force", "--prompt", "9"], "--prompt is for runtimes"),
    ):
        code, _, err = call(["export", *argv, "--to", "optuna"], capsys)
        assert code == 2 and part in err
    assert Path(written).read_bytes() == before and not (tmp_path / "optuna.db").exists()
