"""The folder of an unfinished training: what was asked, and checkpoints that are whole.

It lies beside the final folder under another name, so that the final name never holds a part. A
checkpoint counts once its mark is written, after everything else in it.
"""

import contextlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from kvsearch.errors import RunError
from kvsearch.files import remove_drafts, write_atomic
from kvsearch.folders import sync_tree

MARK = "whole.json"


@contextlib.contextmanager
def saving(place: Path) -> Iterator[None]:
    """A full disk inside is a `RunError`; torch and safetensors have exceptions of their own.

    Args:
        place: what is written, for the sentence.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as e:
        why = " ".join(str(e).split())[:200]
        raise RunError(
            f"cannot write {place}: {why}; free some space, or mend that, and run the same command "
            "again"
        ) from e


@dataclass(frozen=True)
class Checkpoint:
    """One that is whole.

    Attributes:
        path: its folder.
        step: optimizer steps until then.
        seconds: of training until then.
    """

    path: Path
    step: int
    seconds: float


class Work:
    """The folder `NAME.training` beside `NAME`, locked until `close`.

    Args:
        out: the final folder.

    Raises:
        RunError: it cannot be written, or another process trains in it.
    """

    def __init__(self, out: Path) -> None:
        self.path = out.with_name(f"{out.name}.training")
        self.checkpoints = self.path / "checkpoints"
        self._lock = FileLock(self.path / ".lock")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
        except Timeout as e:
            raise RunError(f"another kvsearch trains in {self.path}; give another --out") from e
        except OSError as e:
            raise RunError(
                f"cannot write to {self.path}: {e.strerror or e}; give another --out"
            ) from e
        remove_drafts(self.path)

    def claim(self, asked: dict[str, Any]) -> None:
        """Note what was asked, or check that it was the same where a checkpoint is whole.

        Raises:
            RunError: something else was, or the note is damaged.
        """
        file, now = self.path / "asked.json", json.loads(json.dumps(asked))
        if self.last() is None:  # nothing to go on from, so nothing to contradict
            write_atomic(file, json.dumps(asked, indent=2) + "\n")
            return
        try:
            before = json.loads(file.read_text(encoding="utf-8"))
            other = [k for k in now if before.get(k) != now[k]]
        except (OSError, ValueError, AttributeError) as e:
            raise RunError(f"cannot read {file}: {e}; remove {self.path} to start anew") from e
        if other:
            raise RunError(
                f"{self.path} holds an unfinished training with another {', '.join(other)}; give "
                "another --out, or remove that folder to start anew"
            )

    def mark(self, step: int, seconds: float) -> None:
        """Say that the checkpoint of a step is whole, once all of it is on the disk."""
        path = self.checkpoints / f"checkpoint-{step}"
        with saving(path):
            sync_tree(path)
            said = {"step": step, "seconds": seconds, "sizes": _sizes(path)}
        write_atomic(path / MARK, json.dumps(said) + "\n")

    def last(self) -> Checkpoint | None:
        """The newest checkpoint that is whole; what is left of others is removed.

        Raises:
            RunError: one cannot be read, though it is there.
        """
        found = []
        for path in self.checkpoints.glob("checkpoint-*"):
            try:
                mark = json.loads((path / MARK).read_text(encoding="utf-8"))
                found.append(Checkpoint(path, int(mark["step"]), float(mark["seconds"])))
                if path.name != f"checkpoint-{mark['step']}":
                    raise ValueError("the mark is of another checkpoint")
                if mark.get("sizes", _sizes(path)) != _sizes(path):  # earlier versions have none
                    raise ValueError("a file is not what was marked")
            except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError,
                    AttributeError):  # fmt: skip
                found = [c for c in found if c.path != path]
                shutil.rmtree(path, ignore_errors=True)
            except OSError as e:
                raise RunError(
                    f"cannot read {path}: {e.strerror or e}; mend that, or remove it and run the "
                    "same command again"
                ) from e
        return max(found, key=lambda c: c.step, default=None)

    def close(self, *, done: bool) -> None:
        """Release the folder; remove it if training is done, or never began."""
        left = self.path
        if gone := done or not self.checkpoints.exists():
            with contextlib.suppress(OSError):  # at once: half of it would be no checkpoint
                left = self.path.rename(self.path.with_name(f".{self.path.name}.part"))
        self._lock.release()
        if gone:
            shutil.rmtree(left, ignore_errors=True)


def _sizes(folder: Path) -> dict[str, int]:
    """Bytes of every file in a checkpoint, its mark aside."""
    return {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MARK
    }
