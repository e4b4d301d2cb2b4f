"""The journal of a run: one JSON line per event; the last line of a trial counts.

A kill can tear the last line, and a crash of the machine can leave zeros behind it; both are set
aside, nothing is deleted. A damaged line in the middle is an error.
"""

import json
import math
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from kvsearch.errors import RunError
from kvsearch.files import append_line, write_atomic
from kvsearch.frozen import MOST, first_error, has_half
from kvsearch.policy import Policy
from kvsearch.results.records import Trial, plain

_TRIALS = TypeAdapter(Trial)
MOST_TRIALS = 1_000_000  # Optuna's study has a trial for every number up to the largest


class Journal:
    """Trials in a file.

    A trial that is measured on more windows has a further line.

    Args:
        file: `trials.jsonl`; need not exist.
        mend: set a torn tail aside when it is found; otherwise it is only skipped.
    """

    def __init__(self, file: Path, mend: bool = True) -> None:
        self.file, self.mend = file, mend

    def read(self) -> list[Trial]:
        """Trials as they stand, in the order in which they ended; a torn tail is cut off first.

        Raises:
            RunError: a line before the tail is damaged; it is named and nothing is changed.
        """
        if not self.file.exists():
            return []
        try:
            lines = self.file.read_bytes().split(b"\n")
        except OSError as e:
            raise RunError(f"cannot read {self.file}: {e.strerror or e}") from e
        tail = [lines.pop()]
        while lines and (b"\0" in lines[-1] or not lines[-1].strip()):
            tail.insert(0, lines.pop())  # no line of ours has a zero byte
        last: dict[int, Trial] = {}
        for number, line in enumerate(lines, start=1):
            try:
                trial = _trial(json.loads(line))
            except (
                ValueError,
                LookupError,
                TypeError,
                AttributeError,
                OverflowError,
                RecursionError,
            ) as e:
                why = first_error(e, "of it") if isinstance(e, ValidationError) else str(e)
                raise RunError(
                    f"{self.file} line {number} is damaged ({why[:300]}); mend or remove it"
                ) from e
            if trial.number in last and last[trial.number].state == "running":
                del last[trial.number]  # it ended now, or began again
            last[trial.number] = trial
        torn = b"\n".join(tail)
        if torn and self.mend:
            self._set_aside(torn, b"\n".join([*lines, b""]) if lines else b"")
        return list(last.values())

    def append(self, trial: Trial) -> None:
        """Add an event, whole or not at all; synced to disk if it holds what an evaluation cost."""
        costly = trial.state in ("complete", "failed")
        append_line(self.file, json.dumps(plain(trial)), sync=costly)

    def _set_aside(self, torn: bytes, rest: bytes) -> None:
        aside = self.file.with_suffix(".torn")
        before = aside.read_bytes() if aside.exists() else b""
        write_atomic(aside, before + torn)
        write_atomic(self.file, rest)


def _trial(data: Any) -> Trial:
    if not isinstance(data, dict):
        raise TypeError("no trial")
    _require_plain(data)
    for name, value in data.items():
        if isinstance(value, bool):  # which would count as 0 or 1
            raise TypeError(f"field {name}: neither true nor false")
    trial = Trial(**{**data, "policy": Policy.build(data["policy"])})
    trial = _TRIALS.validate_python(trial.__dict__)
    if abs(trial.number) > MOST_TRIALS:
        raise ValueError(f"field number: there are at most {MOST_TRIALS} trials")
    return trial


def _require_plain(value: Any) -> None:
    """Refuse values that JSON lets through and no table or number type of 64 bits holds."""
    if isinstance(value, dict | list):
        for v in [*value, *value.values()] if isinstance(value, dict) else value:
            _require_plain(v)
    elif isinstance(value, str) and has_half(value):
        raise ValueError("half of a character")
    elif isinstance(value, int | float) and not (math.isfinite(value) and abs(value) <= MOST):
        raise ValueError(f"no number of a trial is {value:.6g}")
