"""Crash counter: evaluations that started and did not finish.

A policy that kills its evaluator can take the driver with it, and no handler runs then. So every
attempt is recorded before it begins; one that was begun `ATTEMPTS` times is given up.
"""

import json
from functools import cached_property
from pathlib import Path

from kvsearch.files import append_line

ATTEMPTS = 3


class Attempts:
    """Counts in a file, one JSON line per change; the last line of an evaluation counts.

    Args:
        file: `attempts.jsonl`; need not exist.
    """

    def __init__(self, file: Path) -> None:
        self.file = file

    def of(self, part: str, fingerprint: str) -> int:
        """How often this policy was begun on this part of the text without an end."""
        return self._counts.get((part, fingerprint), 0)

    def begin(self, part: str, fingerprint: str) -> int:
        """Count one more, before it begins; returns the count."""
        return self._set(part, fingerprint, self.of(part, fingerprint) + 1)

    def release(self, part: str, fingerprint: str) -> None:
        """Take one back: the run was stopped, and the policy was not the cause."""
        self._set(part, fingerprint, max(0, self.of(part, fingerprint) - 1))

    def end(self, part: str, fingerprint: str) -> None:
        """Forget all: the evaluation ended, with a result or an error."""
        self._set(part, fingerprint, 0)

    def _set(self, part: str, fingerprint: str, count: int) -> int:
        if count != self.of(part, fingerprint):
            line = {"part": part, "fingerprint": fingerprint, "attempts": count}
            append_line(self.file, json.dumps(line), sync=False)
            self._counts[part, fingerprint] = count
        return count

    @cached_property
    def _counts(self) -> dict[tuple[str, str], int]:
        """By part and fingerprint; lines torn by a kill or a crash are skipped."""
        found: dict[tuple[str, str], int] = {}
        if self.file.exists():
            for line in self.file.read_bytes().split(b"\n"):
                try:
                    said = json.loads(line)
                    found[said["part"], said["fingerprint"]] = int(said["attempts"])
                except (ValueError, TypeError, KeyError):
                    continue
        return found
