"""Every committed study still says what its records say."""

import shutil
from pathlib import Path

import pytest

from kvsearch.app.summary import read
from kvsearch.report.tables import front_csv
from kvsearch.search.folder import RunFolder

STUDIES = Path(__file__).resolve().parent.parent / "studies"
RUNS = sorted(p.parent for p in STUDIES.glob("*/measured.json"))


def test_there_is_a_study() -> None:
    assert RUNS


@pytest.mark.parametrize("study", RUNS, ids=lambda p: p.name)
def test_tables_follow_from_the_records(study: Path, tmp_path: Path) -> None:
    copy = tmp_path / study.name
    shutil.copytree(study, copy)
    folder = RunFolder(copy)
    try:
        summary = read(folder)
    finally:
        folder.close()
    assert front_csv(summary.rows) == (study / "front.csv").read_text()
    assert summary.recommended is not None
    for row in summary.rows:
        assert row.bytes_resident <= row.bytes_peak
