"""Torn, damaged, locked, full and read-only: what a folder survives, and what it refuses.

And that its files are the same bytes on every system.
"""

import errno
import json
import os
import re
import resource
import subprocess
from pathlib import Path

import pytest
from conftest import outcomes, start

import kvsearch
from kvsearch.errors import RunError
from kvsearch.files import append_line, write_atomic
from kvsearch.policy import Policy
from kvsearch.results.folder import RunFolder
from kvsearch.results.journal import Journal
from kvsearch.results.records import Trial, plain


@pytest.mark.parametrize(
    "tail",
    [b'{"number": 3, "na', b"\0" * 700, b"\0" * 64 + b"\n", b'{"num\0\0\0', b"\0\n\0\0\n\0"],
    ids=["torn", "zeros", "zeros and a newline", "torn into zeros", "lines of zeros"],
)
def test_a_tail_that_a_crash_left_is_set_aside(
    uninterrupted: Path, tail: bytes, tmp_path: Path
) -> None:
    """With it a run goes on: `test_a_killed_run_ends_like_an_uninterrupted_one`."""
    whole = (uninterrupted / "trials.jsonl").read_bytes()
    (file := tmp_path / "trials.jsonl").write_bytes(whole + tail)
    assert outcomes(tmp_path) == outcomes(uninterrupted)
    assert file.read_bytes() == whole
    assert tail.strip(b"\n") in (tmp_path / "trials.torn").read_bytes()


@pytest.mark.parametrize("line", [b"[1]", b"null", b"[" * 100_000], ids=["list", "null", "deep"])
def test_a_line_that_is_no_trial_is_named(line: bytes, tmp_path: Path) -> None:
    (tmp_path / "trials.jsonl").write_bytes(line + b"\n")
    with pytest.raises(RunError, match="line 1 is damaged"):
        Journal(tmp_path / "trials.jsonl").read()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("number", "true"),
        ("number", "1" + 30 * "0"),
        ("number", "1000000000"),  # Optuna would be given so many trials
        ("nll", "1e999"),
        ("dnll", "NaN"),
        ("bytes_peak", str(2**63)),
        ("speed", "1" + 30 * "0"),
        ("name", '"\\ud83d"'),
        ("params", '{"interval": 1e999}'),
        ("params", '{"\\ud83d": 1}'),
    ],
)
def test_a_value_that_no_table_holds_is_named(field: str, value: str, tmp_path: Path) -> None:
    file, done = tmp_path / "trials.jsonl", Trial(3, "x", "full", "complete", Policy(), "0f")
    line = json.dumps({**plain(done), field: "here"}).replace('"here"', value)
    file.write_text("\n".join([json.dumps(plain(done)), line, json.dumps(plain(done)), ""]))
    before = file.read_bytes()
    with pytest.raises(RunError, match=r"line 2 is damaged \(.*\); mend or remove it") as error:
        Journal(file).read()
    assert file.read_bytes() == before
    str(error.value).encode()  # to be printed


@pytest.mark.parametrize("left", [b"PAR1", None], ids=["damaged", "missing"])
def test_losses_that_cannot_be_read_say_what_to_do(left: bytes | None, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    if left is not None:
        (folder.path / "nll" / "search-abc.parquet").write_bytes(left)
    with pytest.raises(RunError, match=r"cannot read .*search-abc\.parquet.*; restore it, or"):
        folder.load_nll("search", "abc")
    folder.close()


def test_a_second_driver_is_refused_and_a_dead_one_is_not_in_the_way(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = start(folder, "--trials", "400", "--seconds", "0.2")
    while not (folder / "trials.jsonl").exists():
        assert first.poll() is None
    second = start(folder, "--trials", "400")
    _, err = second.communicate(timeout=120)
    assert second.returncode == 2 and "another kvsearch is working" in err
    first.kill()
    first.communicate(timeout=60)
    RunFolder(folder).close()  # at once, without waiting for a stale lock


def limited() -> None:
    """No file may grow beyond 24 kB: the nearest thing to a full disk that needs no rights."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (24_000, 24_000))


def test_no_room_for_the_journal_loses_nothing(uninterrupted: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    child = start(folder, "--trials", "60", "--seconds", "0", before=limited)
    _, err = child.communicate(timeout=120)
    assert child.returncode == 2 and "cannot write" in err and "Traceback" not in err
    whole = (folder / "trials.jsonl").read_bytes()
    assert whole.endswith(b"\n") and all(json.loads(line) for line in whole.splitlines())
    assert not list(folder.rglob("*.tmp"))
    child = start(folder, "--trials", "60", "--seconds", "0")
    _, err = child.communicate(timeout=120)
    assert child.returncode == 0, err
    assert outcomes(folder) == outcomes(uninterrupted)


@pytest.fixture
def disk(tmp_path: Path):
    """A disk of 192 kB, where this user may mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    options = ["mount", "-t", "tmpfs", "-o", "size=192k", "tmpfs", str(place)]
    try:
        done = subprocess.run(options, capture_output=True)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode:
        pytest.skip("mounting a small disk needs rights that this user lacks")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_and_then_room_again(uninterrupted: Path, disk: Path, tmp_path: Path) -> None:
    folder, log = disk / "run", str(tmp_path / "log")
    child = start(folder, "--trials", "60", "--seconds", "0", "--log", log)
    _, err = child.communicate(timeout=120)
    assert child.returncode == 2 and "the disk is full" in err and "Traceback" not in err
    before = Journal(folder / "trials.jsonl").read()
    assert not list(folder.rglob("*.tmp"))
    subprocess.run(["mount", "-o", "remount,size=8m", str(disk)], check=True)
    child = start(folder, "--trials", "60", "--seconds", "0", "--log", log)
    _, err = child.communicate(timeout=120)
    assert child.returncode == 0, err
    assert len(before) > 3 and outcomes(folder) == outcomes(uninterrupted)


def test_a_read_only_disk_is_one_sentence(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    child = start(disk / "run", "--trials", "3")
    _, err = child.communicate(timeout=120)
    assert child.returncode == 2 and "another --out" in err and "Traceback" not in err


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path, monkeypatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(RunError, match="give another --out"):
        RunFolder(tmp_path / "run")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file_and_no_crumbs(tmp_path, monkeypatch, code, call):
    target = write_atomic(tmp_path / "new" / "front.csv", "old")

    def fail(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(RunError, match=r"^cannot write .*front\.csv: the disk is "):
        write_atomic(target, b"a half-written " * 1000)
    assert [p.name for p in target.parent.iterdir()] == ["front.csv"]
    assert target.read_text() == "old"


def test_a_journal_has_the_same_line_ends_on_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    binary, flags, real = 1 << 30, list[int](), os.open

    def opened(path: Path, flag: int, mode: int = 0o777) -> int:
        flags.append(flag)
        return real(path, flag & ~binary, mode)

    monkeypatch.setattr(os, "O_BINARY", binary, raising=False)
    monkeypatch.setattr(os, "open", opened)
    append_line(tmp_path / "trials.jsonl", "{}", sync=False)
    assert flags[0] & binary
    write_atomic(tmp_path / "front.csv", "a\nb\n")
    assert (tmp_path / "trials.jsonl").read_bytes() == b"{}\n"
    assert (tmp_path / "front.csv").read_bytes() == b"a\nb\n"


def test_nothing_is_written_in_text_mode() -> None:
    package = Path(kvsearch.__file__).parent
    text = re.compile(r"write_text\(|\bopen\([^)]*[\"'][wax]t?\+?[\"']")
    found = [f.name for f in package.rglob("*.py") if text.search(f.read_text(encoding="utf-8"))]
    assert found == []
