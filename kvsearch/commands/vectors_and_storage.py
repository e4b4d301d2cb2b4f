"""What exports write for no runtime: a conformance kit, and trials for Optuna's tools."""

from os import PathLike
from pathlib import Path

from kvsearch.errors import RunError
from kvsearch.files import write_all, write_atomic
from kvsearch.models.shared import policy_file
from kvsearch.options import study as studies
from kvsearch.policy import Policy
from kvsearch.policy_search.optuna_storage import sqlite
from kvsearch.results.folder import RunFolder

FILE = "optuna.db"


def write_other(
    source: str | PathLike[str],
    to: str,
    out: str | PathLike[str] | None,
    *,
    force: bool,
    prompt: int,
) -> tuple[Path, ...]:
    """Write `vectors` of a policy file, or of a folder with one; or `optuna` of a run folder."""
    if to == "optuna":
        return (optuna_storage(source, out, force=force),)
    return vectors(policy_file(str(source)), out, prompt=prompt, force=force)


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
        study = studies.read(folder / "study.json")
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
        "model": study.model.name,
        "settings": study.settings.plain(),
        "text": {part: about["name"] for part, about in study.text.plain().items()},
        "versions": study.versions,
    }
    return write_atomic(
        file, sqlite(folder.resolve().name, about, trials, study.settings.budget_bytes)
    )


def vectors(
    policy: str | PathLike[str],
    out: str | PathLike[str] | None = None,
    *,
    prompt: int = 0,
    force: bool = False,
) -> tuple[Path, ...]:
    """Write what a runtime must compute under a policy, see `docs/vectors.md`.

    Args:
        policy: a policy file.
        out: folder; by default one beside the policy file.
        prompt: tokens that arrive in one call; 0 chooses.
        force: overwrite existing files.

    Returns:
        The files.

    Raises:
        KvsearchError: the policy cannot be read, needs a text, or other files exist; nothing was
            written.
    """
    from kvsearch.vectors import kit  # loads torch

    asked = Policy.from_json(policy)
    folder = Path(policy).with_name(f"{Path(policy).stem}-vectors") if out is None else Path(out)
    return write_all(folder, kit(asked, prompt), force=force)
