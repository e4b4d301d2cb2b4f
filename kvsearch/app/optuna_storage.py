"""A run folder for Optuna's tools."""

from os import PathLike
from pathlib import Path

from kvsearch.errors import RunError
from kvsearch.exporters.optuna_storage import sqlite
from kvsearch.files import write_atomic
from kvsearch.policy_search import run_files
from kvsearch.policy_search.folder import RunFolder

FILE = "optuna.db"


def optuna_storage(
    run: str | PathLike[str], out: str | PathLike[str] | None = None, *, force: bool = False
) -> Path:
    """Write the trials of a run, finished or not, as an Optuna storage.

    Args:
        run: the run folder.
        out: file, or a folder for `optuna.db`; by default in the run folder.
        force: overwrite an existing file.

    Returns:
        The SQLite file; `optuna-dashboard sqlite:///FILE` opens it.

    Raises:
        RunError: it is no run folder, or the file exists; nothing was written.
    """
    folder = Path(run)
    try:
        asked = run_files.study(folder / "study.json")
    except (FileNotFoundError, NotADirectoryError) as e:
        raise RunError(f"{folder} is no run folder; --to optuna needs that of a run") from e
    file = folder / FILE if out is None else Path(out)
    if file.is_dir() or (out is not None and not file.suffix):
        file = file / FILE
    if file.exists() and not force:
        raise RunError(f"{file} exists; give --force to overwrite it, or another file with -o")
    trials = RunFolder(folder, write=False).journal.read()
    if not trials:
        raise RunError(f"{folder} holds no trials yet")
    about = {
        "model": asked["model"]["name"],
        "settings": asked["settings"],
        "text": {part: about.get("name") for part, about in asked["text"].items() if about},
        "versions": asked["versions"],
    }
    return write_atomic(
        file, sqlite(folder.resolve().name, about, trials, asked["settings"]["budget_bytes"])
    )
