"""An environment of its own for each runtime that an export is proven in.

Runtimes pin versions that this package cannot share, so they run in a subprocess, in a virtual
environment in the user's cache folder.
"""

import os
import subprocess
import sys
import venv
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_here
from pathlib import Path

from kvsearch.errors import RunError
from kvsearch.exporters.target import Target
from kvsearch.models.disk_cache import cache_folder, keep


def python_of(target: Target) -> Path:
    """The interpreter of a target's environment; the file may not exist."""
    place = cache_folder() / _entry(target)
    return place / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def installed(target: Target) -> str | None:
    """Version of the runtime in its environment, else in this one; None if it is in neither."""
    if target.distribution is None:
        return None
    python = python_of(target)
    if python.is_file():
        code = f"from importlib.metadata import version; print(version({target.distribution!r}))"
        done = subprocess.run([python, "-c", code], capture_output=True, text=True)
        if not done.returncode:
            return done.stdout.strip()
    try:
        return version_here(target.distribution)
    except PackageNotFoundError:
        return None


def require(target: Target) -> Path:
    """The interpreter that runs a target: of its environment, or this one.

    Raises:
        RunError: the target is not run, not installed, or there in another version.
    """
    if not target.runs:
        raise RunError(f"--verify cannot run {target.name}; leave it out")
    if target.environment is None:
        assert target.distribution is not None
        if (here := installed(target)) != target.version:
            raise RunError(
                f"{target.runtime} {here} is installed, and the export speaks {target.version}; "
                f"install that version, or leave --verify out"
            )
        return Path(sys.executable)
    python = python_of(target)
    how = f"run `kvsearch targets --install {target.name}`"
    if not python.is_file():
        raise RunError(f"{target.runtime} {target.version} is not installed; {how}")
    if (found := installed(target)) != target.version:
        raise RunError(
            f"{python.parent.parent} holds {target.runtime} {found}, and the export speaks "
            f"{target.version}; remove that folder and {how}"
        )
    return python


def install(target: Target, say: Callable[[str], None]) -> Path:
    """Make a target's environment, where there is none; returns its interpreter.

    Args:
        target: a runtime.
        say: told what takes long.

    Raises:
        RunError: the target needs no environment, or pip failed; none is left behind then.
    """
    wanted = target.environment
    if wanted is None:
        raise RunError(f"{target.name} has no environment to install; its exports are not run here")

    def make(draft: Path) -> None:
        say(f"installing {' '.join(wanted.requirements)}: {wanted.about}")
        venv.create(draft, with_pip=True, clear=True)
        python = draft / python_of(target).relative_to(cache_folder() / _entry(target))
        command = [str(python), "-m", "pip", "install", *wanted.options, *wanted.requirements]
        done = subprocess.run(
            command, env={**os.environ, **wanted.variables}, capture_output=True, text=True
        )
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise RunError(f"pip could not install {target.runtime} {target.version}: {last}")
        if wanted.unwanted:
            subprocess.run(
                [str(python), "-m", "pip", "uninstall", "--yes", *wanted.unwanted],
                capture_output=True,
            )

    try:
        keep(_entry(target), make)
    except OSError as e:
        raise RunError(f"cannot write {cache_folder()}: {e.strerror}") from e
    return python_of(target)


def _entry(target: Target) -> str:
    tag = f"{sys.version_info.major}.{sys.version_info.minor}"
    return f"runtime-{target.name}-{target.version}-py{tag}"
