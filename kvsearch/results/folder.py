"""A run as a folder: what was asked, every trial, every token's NLL. All else is rebuilt from it.

`study.json` says what was asked and is not rewritten once a run has begun; `trials.jsonl` is the
journal: a line when a trial starts, and one when it ended, after its NLL file is safely on disk.
`attempts.jsonl` counts evaluations that were begun and did not end. Running the same command again
goes on.

A finished run that is kept as a study has its NLL in `blocks.parquet` instead, as sums over blocks
of scored tokens: a fortieth of the size, and every table follows from them.
"""

import json
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock, Timeout
from numpy.typing import NDArray
from pydantic import TypeAdapter

from kvsearch.errors import RunError, named, quoted, reason
from kvsearch.files import remove_drafts, write_atomic, write_parquet
from kvsearch.results.attempts import Attempts
from kvsearch.results.intervals import BLOCK, Blocks, blocks
from kvsearch.results.journal import Journal
from kvsearch.results.measurement import Answered, Measurement
from kvsearch.results.records import Trial, plain
from kvsearch.results.study import Study

BLOCKS = "blocks.parquet"
_BESIDE = ("tokens", "bytes_resident", "seconds", "impls")  # of a `Measurement`
_ANSWER = pa.struct(  # the fields of `Answered`, in the table of losses and in that of blocks
    {
        "of": pa.string(), "group": pa.string(), "weight": pa.float64(),
        "exact": pa.list_(pa.bool_()), "first": pa.list_(pa.list_(pa.int32())),
        "kl": pa.list_(pa.float64()),
        "needle": pa.struct({"length": pa.int32(), "depth": pa.float64()}), "nll": pa.float64(),
    }
)  # fmt: skip
_OLDER = TypeAdapter(tuple[Answered, ...])  # answers that are in a file's metadata
_DAMAGE = (OSError, pa.ArrowException, LookupError, TypeError, ValueError)  # of a Parquet file


def run_of(file: Path) -> Path | None:
    """The run folder that a policy file lies in, if it lies in one."""
    return next((f for f in file.resolve().parents[:2] if (f / "study.json").is_file()), None)


class RunFolder:
    """One run on disk.

    Args:
        path: the folder; made if missing.
        write: False only reads: nothing is locked, made or mended.
    """

    def __init__(self, path: Path, write: bool = True) -> None:
        self.path, self.journal = path, Journal(path / "trials.jsonl", mend=write)
        self.attempts = Attempts(path / "attempts.jsonl")
        self._lock: FileLock | None = None
        if write:
            self._open(path)

    def _open(self, path: Path) -> None:
        try:
            (path / "nll").mkdir(parents=True, exist_ok=True)
            (path / "policies").mkdir(exist_ok=True)
            self._lock = FileLock(path / ".lock")
            self._lock.acquire(timeout=0)
        except Timeout as e:
            raise RunError(f"another kvsearch is working in {path}; give another --out") from e
        except (OSError, ValueError) as e:  # also of a name with a zero byte
            raise RunError(f"cannot write to {named(path)}: {reason(e)}; give another --out") from e
        for place in (path, path / "nll", path / "policies"):
            remove_drafts(place)

    def close(self) -> None:
        """Release the lock of the folder."""
        if self._lock is not None:
            self._lock.release()

    # -- what was asked ------------------------------------------------------------------------

    def claim(self, asked: Study) -> bool:
        """Write `study.json`, or check that this run asked the same, if one has begun.

        Returns:
            Whether one has begun.

        Raises:
            RunError: the folder holds a run of something else; the differences are named.
        """
        file, begun = self.path / "study.json", False
        if file.exists():
            was, now = Study.read(file).question, asked.question
            differing = [
                f"{key} was {quoted(was.get(key))}, now {quoted(now.get(key))}"
                for key in sorted(set(was) | set(now))
                if was.get(key) != now.get(key)
            ]
            there = {f.name for f in self.path.rglob("*") if f.is_file()}
            begun = not there <= {"study.json", ".lock"}  # something was measured or tried
            if differing and begun:
                raise RunError(
                    f"{self.path} holds another run ({'; '.join(differing)[:400]}); give another "
                    "--out"
                )
            if not differing:
                return begun
        write_atomic(file, json.dumps(asked.document(), indent=2, sort_keys=True) + "\n")
        return begun  # False: a start that was refused leaves no run behind

    # -- trials --------------------------------------------------------------------------------

    def trials(self) -> list[Trial]:
        """Finished trials in the order in which they ended."""
        return [t for t in self.journal.read() if t.state != "running"]

    def running(self) -> list[Trial]:
        """Trials that an evaluator had when the driver was killed, oldest first."""
        return sorted(
            (t for t in self.journal.read() if t.state == "running"), key=lambda t: t.number
        )

    def append(self, trial: Trial) -> None:
        """Add one started or finished trial to the journal."""
        self.journal.append(trial)

    # -- per-token NLL -------------------------------------------------------------------------

    def has_nll(self, part: str, fingerprint: str) -> bool:
        """Whether `save_nll` was called for it."""
        return self._nll(part, fingerprint).exists()

    def save_nll(
        self, part: str, fingerprint: str, found: Measurement, name: str | None = None
    ) -> None:
        """Keep what was measured of a policy on a part of the text, whole or not at all.

        Args:
            part: of the text.
            fingerprint: of the policy.
            found: its losses, a row a token, and answers, in the first row of their window;
                numbers of the whole go into the file's metadata.
            name: of the policy, for people.
        """
        nll, about = found.nll, {"name": name, **{k: getattr(found, k) for k in _BESIDE}}
        windows, tokens = nll.shape
        answers = {}
        if found.answers:
            rows = [x for a in found.answers for x in (_plain(a), *[None] * (tokens - 1))]
            answers = {"answer": pa.array(rows, type=_ANSWER)}
        table = pa.table(
            {
                "window": _column(np.repeat(np.arange(windows, dtype=np.int32), tokens)),
                "pos": _column(np.tile(np.arange(1, tokens + 1, dtype=np.int32), windows)),
                "nll": _column(nll.ravel()),
                **answers,
            },
            metadata={"about": json.dumps(plain(about))},
        )
        how = {"use_byte_stream_split": ["nll"], "use_dictionary": ["window", "pos"]}
        write_parquet(self._nll(part, fingerprint), table, **how)

    def load_nll(self, part: str, fingerprint: str) -> Measurement:
        """What `save_nll` kept.

        Raises:
            RunError: the file is missing or damaged.
        """
        file = self._nll(part, fingerprint)
        try:
            with file.open("rb") as raw, pq.ParquetFile(raw) as f:  # pyarrow takes UTF-8 names only
                table = f.read(use_threads=False)
            windows = int(_values(table["window"])[-1]) + 1
            about = json.loads(table.schema.metadata[b"about"])
            beside = {k: about[k] for k in _BESIDE if k in about}
            if "answer" in table.column_names:
                answers = _answers(table["answer"].to_pylist())
            else:
                answers = _OLDER.validate_python(about.get("answers", ()))
            nll = _values(table["nll"]).reshape(windows, -1)
            return Measurement(nll, **beside, answers=answers)
        except _DAMAGE as e:
            raise RunError(
                f"cannot read {file}: {' '.join(str(e).split())[:300]}; restore it, or run the "
                "search again with another --out"
            ) from e

    def drop_nll(self, part: str, fingerprint: str) -> None:
        """Forget what was saved of a policy on a part of the text."""
        self._nll(part, fingerprint).unlink(missing_ok=True)

    def pieces(self, part: str) -> list[tuple[int, str]]:
        """First window and fingerprint of what was saved as `PART.FIRST`, see `prefetched`."""
        names = (f.stem.rpartition("-") for f in (self.path / "nll").glob(f"{part}.*-*.parquet"))
        return sorted((int(name.rpartition(".")[2]), key) for name, _, key in names)

    # -- losses in blocks ----------------------------------------------------------------------

    def has_losses(self, part: str, fingerprint: str) -> bool:
        """Whether the policy was measured on this part of the text, however it is stored."""
        return self.has_nll(part, fingerprint) or (part, fingerprint) in self._blocks

    def losses(self, part: str, fingerprint: str, start: int) -> Blocks:
        """Losses of a policy on a part of the text, in blocks of `stats.BLOCK` tokens.

        Args:
            part: of the text.
            fingerprint: of the policy.
            start: how many losses at the beginning of each window are not scored.

        Raises:
            RunError: they are missing or damaged, or stored without other tokens than these.
        """
        if self.has_nll(part, fingerprint) or (part, fingerprint) not in self._blocks:
            found = self.load_nll(part, fingerprint)
            return blocks(found.nll[:, start:], groups=found.groups, strata=found.strata)
        kept_from, kept, _ = self._blocks[part, fingerprint]
        if kept_from != start:
            raise RunError(
                f"{self.path / BLOCKS} holds losses scored from token {kept_from + 1} on, not from "
                f"{start + 1}"
            )
        return kept

    def answers(self, part: str, fingerprint: str) -> tuple[Answered, ...]:
        """Answers of a policy on a part of prompts, one an item; raises as `losses` does."""
        if self.has_nll(part, fingerprint) or (part, fingerprint) not in self._blocks:
            return self.load_nll(part, fingerprint).answers
        return self._blocks[part, fingerprint][2]

    def shrink(self, start: int) -> None:
        """Replace every per-token NLL by sums over blocks of scored tokens.

        For a finished run that is kept. It cannot be continued, and blocks cannot be made shorter.

        Args:
            start: as for `losses`.
        """
        files = sorted((self.path / "nll").glob("*.parquet"))
        names = [*self._blocks, *(f.stem.rsplit("-", 1) for f in files)]
        found = {(part, key): self.losses(part, key, start) for part, key in names}
        answers = [self.answers(part, key) for part, key in found]
        columns = {
            "part": pa.array([part for part, _ in found]),
            "fingerprint": pa.array([key for _, key in found]),
            "window_tokens": pa.array([int(b.tokens.sum()) for b in found.values()]),
            "sums": pa.array([b.sums.tolist() for b in found.values()]),  # of each window
        }
        if any(answers):
            rows = [[_plain(a) for a in some] for some in answers]
            columns["answers"] = pa.array(rows, type=pa.list_(_ANSWER))
        if any(b.groups for b in found.values()):
            columns["groups"] = pa.array([list(b.groups) for b in found.values()])
        if any(b.strata for b in found.values()):
            columns["strata"] = pa.array([list(b.strata) for b in found.values()])
        about = {"block": str(BLOCK), "start": str(start)}
        write_parquet(
            self.path / BLOCKS,
            pa.table(columns, metadata=about),
            compression_level=19,
            use_dictionary=["part", "fingerprint", "window_tokens"],
            use_byte_stream_split=["sums.list.element.list.element"],
        )
        self.__dict__.pop("_blocks", None)
        for file in files:
            file.unlink()

    @cached_property
    def _blocks(self) -> dict[tuple[str, str], tuple[int, Blocks, tuple[Answered, ...]]]:
        """By part and fingerprint: how many losses are not scored, others as blocks, answers."""
        file = self.path / BLOCKS
        if not file.exists():
            return {}
        found = {}
        try:
            with file.open("rb") as raw, pq.ParquetFile(raw) as f:  # pyarrow takes UTF-8 names only
                table = f.read(use_threads=False)
            block, start = (int(table.schema.metadata[k]) for k in (b"block", b"start"))
            for row in table.to_pylist():
                tokens = np.diff([*range(0, row["window_tokens"], block), row["window_tokens"]])
                about = (tuple(row.get(k) or ()) for k in ("groups", "strata"))
                of = Blocks(np.array(row["sums"]), tokens, *about)
                answers = _answers(row.get("answers") or ())
                found[row["part"], row["fingerprint"]] = start, of, answers
        except _DAMAGE as e:
            raise RunError(f"cannot read {file}: {' '.join(str(e).split())[:300]}") from e
        return found

    def _nll(self, part: str, fingerprint: str) -> Path:
        return self.path / "nll" / f"{part}-{fingerprint}.parquet"


def _plain(answered: Answered) -> dict[str, Any]:
    """As a value of `_ANSWER`."""
    found, needle = dict(vars(answered)), answered.needle
    found["needle"] = needle and dict(zip(("length", "depth"), needle, strict=True))
    return found


def _answers(rows: Iterable[dict[str, Any] | None]) -> tuple[Answered, ...]:
    """Of values of `_ANSWER`, what is there."""
    return tuple(
        Answered(**{**row, "needle": row["needle"] and tuple(row["needle"].values())})
        for row in rows
        if row is not None
    )


# pyarrow's shorter ways (`array`, `read_table`, `to_numpy`) import pandas: a quarter of a second.


def _column(values: NDArray[Any]) -> pa.Array:
    kind = pa.from_numpy_dtype(values.dtype)
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def _values(column: pa.ChunkedArray) -> NDArray[Any]:
    return np.concatenate([np.from_dlpack(chunk) for chunk in column.chunks])
