"""`kvsearch study`: do the tables of a kept study still follow from its records?

A study is a run folder, whose `front.csv` follows from its losses; or a folder with a `derive.py`
that writes its tables into the folder given by `--out`; or one whose `results.csv` is as it was
measured. The last two may keep runs in folders of their own: a `front.csv` in one of these follows
from that run's losses, and where a run is kept without one, nothing is missing.
"""

import re
import subprocess
import sys
import tempfile
from importlib.metadata import requires
from math import isclose
from pathlib import Path

from kvsearch.errors import RunError
from kvsearch.files import write_atomic
from kvsearch.report.tables import front_csv
from kvsearch.results.folder import RunFolder
from kvsearch.run import summarise

FRONT = "front.csv"
NUMBER = re.compile(rb"(-?\d+\.\d+(?:e[-+]?\d+)?)")  # whole numbers and names are text
LAST = 1e-10  # relative, and absolute for what is nearly zero


def check(study: Path) -> dict[str, bool | None]:
    """Whether each derived table is what its records say.

    Args:
        study: the folder.

    Returns:
        Table name -> whether it is up to date; None where the file is absent.

    Raises:
        RunError: there is no study, or its records are damaged.
    """
    found: dict[str, bool | None] = {}
    for name, text in _derived(study).items():
        file = study / name
        found[name] = same(file.read_bytes(), text) if file.is_file() else None
    return found


def same(kept: bytes, derived: bytes) -> bool:
    """Whether two tables say the same: equal texts, but for the last digits of their numbers.

    Processors sum in different orders, so a mean may differ by a few units in its last place.
    """
    if kept == derived:
        return True
    one, two = NUMBER.split(kept), NUMBER.split(derived)
    if one[::2] != two[::2]:
        return False
    pairs = zip(one[1::2], two[1::2], strict=True)
    return all(a == b or isclose(float(a), float(b), rel_tol=LAST, abs_tol=LAST) for a, b in pairs)


def rebuild(study: Path) -> list[str]:
    """Write every derived table anew; returns their names."""
    derived = _derived(study)
    for name, text in derived.items():
        write_atomic(study / name, text)
    return sorted(derived)


def _derived(study: Path) -> dict[str, bytes]:
    if (study / "measured.json").is_file() and not (study / "derive.py").is_file():
        return {FRONT: _from_run(study)}
    if (study / "derive.py").is_file():
        found = _from_script(study)
    elif any((study / name).is_file() for name in ("results.csv", "measure.py")):
        found = {}  # what it measures is a table already, or stands on a page
    else:
        raise RunError(
            f"{study} is no study: it has no derive.py, measured.json, results.csv or measure.py"
        )
    for run in sorted(f.parent for f in study.rglob(FRONT)):
        if (run / "measured.json").is_file():
            found[(run.relative_to(study) / FRONT).as_posix()] = _from_run(run)
    return found


def _from_run(run: Path) -> bytes:
    return front_csv(summarise.read(RunFolder(run, write=False)).rows).encode()


def _from_script(study: Path) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as place:
        done = subprocess.run(
            [sys.executable, str(study / "derive.py"), "--out", place],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise RunError(f"{study / 'derive.py'} failed: {last}{_install(last)}")
        return {p.name: p.read_bytes() for p in sorted(Path(place).iterdir())}


def _install(error: str) -> str:
    """Which extra brings the package that a script lacks; nothing for any other error."""
    lacking = re.match(r"ModuleNotFoundError: No module named '(\w+)", error)
    for package in (requires("kvsearch") or ()) if lacking else ():
        found = re.fullmatch(r"([\w-]+).*; extra == ['\"](\w+)['\"]", package)
        if found and lacking and found[1].replace("-", "_") == lacking[1]:
            return f"; pip install 'kvsearch[{found[2]}]'"
    return ""
