"""Every committed study still says what its records say."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvsearch.commands.study import check, rebuild
from kvsearch.errors import RunError
from kvsearch.options.study import config_of
from kvsearch.results.folder import RunFolder
from kvsearch.results.measurement import Measurement
from kvsearch.results.study import Study
from tests.command import call

FOLDER = Path(__file__).resolve().parent.parent / "studies"
STUDIES = sorted(  # one without a README is still being made
    p.parent
    for p in FOLDER.glob("*/README.md")
    if (p.parent / "derive.py").exists() or (p.parent / "measured.json").exists()
)


def test_there_is_a_study() -> None:
    assert STUDIES


def test_kept_runs_are_read_back_as_their_options() -> None:
    files = sorted(FOLDER.rglob("study.json"))
    assert len(files) > 30
    for file in files:
        study, there = Study.read(file), json.loads(file.read_text())
        assert study.document() == there, file
        config, settings = config_of(study), there["settings"]
        assert config.recorded().items() <= settings.items(), file
        assert config.budget(study.shape).bytes == settings["budget_bytes"], file
        assert config.exclude_method == tuple(settings["exclude_method"]), file
        if "options" not in there:
            assert (config.context, config.score_from) == (
                settings["context"],
                settings["score_from"],
            )


@pytest.mark.slow
@pytest.mark.parametrize("study", STUDIES, ids=lambda p: p.name)
def test_tables_follow_from_the_records(study: Path) -> None:
    found = check(study)
    assert found and all(found.values()), found


def test_a_run_kept_in_blocks_has_the_same_losses(tmp_path: Path) -> None:
    start, nll = 31, np.random.default_rng(1).exponential(3, size=(2, 255)).astype(np.float32)
    run = RunFolder(tmp_path, write=False)
    run.save_nll("report", "ab12", Measurement(nll))
    before = run.losses("report", "ab12", start)
    for _ in range(2):  # the second time there is nothing to do
        run.shrink(start)
        assert not list(tmp_path.glob("nll/*"))
        after = RunFolder(tmp_path, write=False).losses("report", "ab12", start)
        assert (after.sums == before.sums).all() and (after.tokens == before.tokens).all()
    assert run.has_losses("report", "ab12") and not run.has_losses("also0", "ab12")
    with pytest.raises(RunError, match="from token 32 on, not from 1"):
        run.losses("report", "ab12", 0)


def test_a_changed_table_is_noticed_and_rebuilt(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(FOLDER / "2026-11-first-front", copy)
    table = copy / "front.csv"
    kept = table.read_bytes()
    table.write_bytes(kept.replace(b"0", b"1", 1))
    assert check(copy) == {"front.csv": False}
    assert rebuild(copy) == ["front.csv"] and table.read_bytes() == kept
    number = re.search(rb"\d\.\d{9,}", kept)
    assert number
    for digit, found in ((5, False), (len(number[0]) - 1, True)):  # last places are the processor's
        other = bytearray(kept)
        other[number.start() + digit] ^= 1
        table.write_bytes(other)
        assert check(copy) == {"front.csv": found}
    with pytest.raises(RunError, match="is no study"):
        check(tmp_path)
    (bare := tmp_path / "bare").mkdir()
    (bare / "measure.py").touch()
    assert check(bare) == {}  # a study without a table


def script(folder: Path, text: str) -> Path:
    """A study whose tables come from a script."""
    folder.mkdir()
    (folder / "derive.py").write_text(text)
    return folder


def test_a_study_that_lacks_a_package_does_not_keep_others_from_being_checked(
    tmp_path: Path, capsys: Any
) -> None:
    lacking = script(tmp_path / "a", "raise ModuleNotFoundError(\"No module named 'scipy'\")")
    broken = script(tmp_path / "b", "raise ValueError('no records')")
    good = script(
        tmp_path / "c",
        "import sys, pathlib\npathlib.Path(sys.argv[2], 'table.csv').write_text('1')",
    )
    (good / "table.csv").write_text("1")
    for command in ("check", "rebuild"):
        code, out, err = call(["study", command, str(lacking), str(broken), str(good)], capsys)
        assert code == 2 and f"{good}/table.csv" in out
        assert "No module named 'scipy'; pip install 'kvsearch[gp]'" in err
        assert "no records" in err and err.count("kvsearch: ") == 1
    found = json.loads(call(["study", "check", "--json", str(lacking), str(good)], capsys)[1])
    assert "scipy" in found[str(lacking)]["error"] and found[str(good)] == {"table.csv": True}


def test_the_runs_that_a_study_keeps_are_checked_with_it(tmp_path: Path, capsys: Any) -> None:
    study = script(tmp_path / "study", "")
    kept, records = study / "kept", study / "records" / "one"
    for run in (kept, records):
        shutil.copytree(FOLDER / "2026-11-first-front", run)
    (records / "front.csv").unlink()  # a run may be kept for other tables
    table = kept / "front.csv"
    before = table.read_bytes()
    assert check(study) == {"kept/front.csv": True}
    table.write_bytes(before.replace(b"0", b"1", 1))
    assert check(study) == {"kept/front.csv": False}
    assert rebuild(study) == ["kept/front.csv"] and table.read_bytes() == before
    assert not (records / "front.csv").exists()
    code, out, err = call(["study", "check", str(records), str(study)], capsys)
    assert code == 2 and f"ABSENT  {records}/front.csv" in out and "differ" not in err
    assert check(records) == {"front.csv": None}
