"""A person's own prompts: JSONL, JSON, CSV, Parquet and sets of the hub, in the usual field names.

A record has `prompt`, or `context` with `question` or `questions`, or `messages`; the answer is in
`answer` (a text, or a list of which the first counts) or `answers`. These are kvpress' names, and
those of chat data; `kvsearch.workloads.prompts.fields` knows others. Records of one context are
one item, which is taken in once. An answer follows as it is given; `answer_gap` is what stands
before it, such as a space.
"""

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from os.path import exists
from pathlib import Path
from typing import Any

from kvsearch.errors import TextError, named, quoted
from kvsearch.frozen import has_half, named_once, whole
from kvsearch.workloads.items import About
from kvsearch.workloads.prompts import hub
from kvsearch.workloads.prompts.fields import cell, fields, require_read
from kvsearch.workloads.prompts.messages import Message, messages_of

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
ASKED = ("prompt", "context", "messages")
LONGEST_CELL = 1 << 30  # characters of a cell of CSV
MOST_TOKENS = 4096  # of an answer that is generated


@dataclass(frozen=True)
class Turn:
    """A question and its answer, as text.

    Attributes:
        question: after the context.
        answer: None is to be generated.
        tokens: of a generated answer; None is the default.
        about: fields of the record, for results in kvpress' form; no part of the content.
        gap: what stands between the question and the answer.
    """

    question: str
    answer: str | None
    tokens: int | None = None
    about: About | None = field(default=None, compare=False, repr=False)
    gap: str = field(default="", compare=False, repr=False)


@dataclass(frozen=True)
class Record:
    """A context as text, and what is asked.

    Attributes:
        context: before every question; of a chat it is empty.
        turns: the questions.
        messages: of a chat, up to and with the last answer; the template makes the text.
        group: the document, for statistics: the context, the prompt or the chat.
        where: file and line, for messages.
        template: what a chat's template is called with, such as `enable_thinking` and `tools`.
        tokens: of the answer that the full cache gives at the end of a chat; None is the default.
    """

    context: str
    turns: tuple[Turn, ...]
    messages: tuple[Message, ...]
    group: str
    where: str
    template: dict[str, Any] = field(default_factory=dict)
    tokens: int | None = field(default=None, compare=False)

    @property
    def key(self) -> str:
        """A hash of the content."""
        told = repr((self.context, self.turns, self.messages)) + (
            repr(self.template) if self.template else ""
        )
        return sha256(told.encode("utf-8", "surrogatepass")).hexdigest()

    @property
    def answers(self) -> list[str | None]:
        """The reference of every ask; None is to be generated."""
        if not self.messages:
            return [t.answer for t in self.turns]
        said = [m["content"] for m in self.messages[1:] if m["role"] == "assistant"]
        return [*said, *([None] if self.messages[-1]["role"] != "assistant" else [])]


def read(file: Path) -> list[Record]:
    """All records of a file, or of a set of the hub by its name, those of one context together.

    Args:
        file: or the name of a set, see `kvsearch.workloads.prompts.hub`.

    Raises:
        TextError: the file cannot be read, or a record lacks a field; the sentence has the line
            and the field.
    """
    kind, data = file.suffix.lower(), None if exists(file) else hub.named(str(file))
    if data is None and kind not in SUFFIXES:
        raise TextError(
            f"{named(file)} is no file of prompts: give one of {', '.join(SUFFIXES)}, or a set of "
            f"the hub{hub.hint(str(file))}"
        )
    try:
        rows = list(_ROWS[kind](file) if data is None else hub.numbered(data))
    except OSError as e:
        raise TextError(f"cannot read {named(file)}: {e.strerror or e}") from e
    except (UnicodeDecodeError, csv.Error, RecursionError) as e:
        raise TextError(f"cannot read {file}: {' '.join(str(e).split())[:200]}") from e
    found: dict[str, Record] = {}
    for where, row in rows:
        record = _record(row, where)
        before = found.get(record.group)
        if before is not None and record.context and not record.messages:
            both = tuple(dict.fromkeys((*before.turns, *record.turns)))
            record = Record(record.context, both, (), record.group, before.where)
        found[record.group] = record
    if not found:
        raise TextError(f"{file} has no prompts")
    return list(found.values())


def read_all(files: Iterable[Path]) -> dict[str, list[Record]]:
    """Records of several files, as `read`, by the name of the file.

    Raises:
        TextError: two files have one name, which is that of their rows in every table.
    """
    found: dict[str, list[Record]] = {}
    for file in files:
        name = whole(file.name)
        if name in found:
            raise TextError(f"two files of prompts are called {name}; rename one")
        found[name] = read(file)
    return found


def _record(row: Any, where: str) -> Record:
    if not isinstance(row, Mapping):
        raise TextError(f"{where}: a prompt is an object with fields, got {str(row)[:60]!r}")
    if has_half(json.dumps(row, ensure_ascii=False, default=str)):
        raise TextError(f"{where}: half of a character (\\ud800 to \\udfff) is no text")
    found = fields(row, where)
    if found.get("messages"):
        found["messages"] = _with_answer(found, where)
        messages, template = messages_of(found, where)
        group = repr((messages, template) if template else messages)
        tokens = _tokens(found.get("max_new_tokens"), where)
        record, missing = Record("", (), messages, group, where, template, tokens), []
    elif found.get("context") or found.get("prompt"):
        record = _asked(found, where)
        asks = found.get("question") or found.get("questions") or not found.get("context")
        missing = [] if asks else ["question"]
        if found.get("context"):  # all of them are turns now
            found.pop("questions", None)
    else:
        have = ", ".join(map(str, row))[:100] or "none"
        raise TextError(f"{where}: no field of {', '.join(ASKED)}; it has {have}")
    missing += ["answer"] if None in record.answers else []
    asked = (x for t in record.turns for x in (t.question, t.answer or ""))
    said = (m["content"] for m in record.messages)
    require_read(row, found, [record.context, *asked, *said], missing, where)
    return record


def _asked(row: Mapping[str, Any], where: str) -> Record:
    """A context with its questions, or a prompt, which has none."""
    tokens = _tokens(row.get("max_new_tokens"), where)
    context = _text(row, "context" if row.get("context") else "prompt", where)
    prefix, questions = _plain(row, "answer_prefix", where), [""]
    if row.get("context"):
        questions = row.get("questions") or [row.get("question") or ""]
    if not isinstance(questions, list):
        raise TextError(f"{where}: field questions: give a list")
    answers = _answers(row, len(questions), where)
    pairs = zip(questions, answers, strict=True)
    turns = tuple(_about(row, prefix, _turn(q, prefix, a, tokens, where), where) for q, a in pairs)
    return Record(context, turns, (), context, where)


def _with_answer(row: Mapping[str, Any], where: str) -> Any:
    """Messages, and behind a last question an answer that is beside them."""
    messages, answer = row["messages"], row.get("answer")
    last = messages[-1] if isinstance(messages, list) else None
    if answer is None or not isinstance(last, Mapping):
        return messages
    if last.get("role") == "assistant":
        given = answer[0] if isinstance(answer, list) and answer else answer
        if given not in (last.get("content"), last):
            raise TextError(
                f"{where}: field answer: the messages end in another one; leave one of both out"
            )
        return messages
    if isinstance(answer, list) and _are_messages(answer):
        return messages + answer
    text = _first(answer, where)
    return messages + ([] if text is None else [{"role": "assistant", "content": text}])


def _are_messages(given: Sequence[Any]) -> bool:
    return bool(given) and all(isinstance(m, Mapping) and "role" in m for m in given)


def _turn(question: Any, prefix: str, answer: str | None, tokens: int | None, where: str) -> Turn:
    if isinstance(question, Mapping):
        inner = fields(question, where)
        own = _text(inner, "prompt" if "prompt" in inner else "question", where)
        said = _answers(inner, 1, where)[0] or answer
        require_read(question, inner, [own, said or ""], [] if said else ["answer"], where)
        prefix = _plain(inner, "answer_prefix", where) or prefix
        more = _tokens(inner.get("max_new_tokens"), where)
        return Turn(own + prefix, said, more or tokens)
    if not isinstance(question, str):
        raise TextError(f"{where}: field question: give a text, got {str(question)[:60]!r}")
    return Turn(question + prefix, answer, tokens)


def _about(row: Mapping[str, Any], prefix: str, turn: Turn, where: str) -> Turn:
    """A turn with the fields of its record; of one question all references."""
    given = row.get("answer")
    alone = isinstance(given, list) and not row.get("questions")
    every = given if alone and given else [turn.answer]
    answers = tuple(str(a) for a in every if a is not None)
    question = turn.question.removesuffix(prefix) if prefix else turn.question
    task, gap = str(row.get("task") or ""), _plain(row, "answer_gap", where)
    return replace(turn, about=About(task, question, prefix, answers, turn.tokens), gap=gap)


def _answers(row: Mapping[str, Any], many: int, where: str) -> list[str | None]:
    found = row.get("answer")
    if found is None:
        return [None] * many
    if many > 1:
        if not isinstance(found, list) or len(found) != many:
            raise TextError(f"{where}: field answers: give one for each of {many} questions")
        return [_first(x, where) for x in found]
    return [_first(found, where)]


def _first(answer: Any, where: str) -> str | None:
    """The first reference that is not missing; None if all are."""
    while isinstance(answer, list) and answer:
        answer = next((a for a in answer if a is not None), None)
    if answer is None:
        return None
    whole_number = isinstance(answer, float) and answer.is_integer()  # pandas' 7.0 may be 7
    if isinstance(answer, bool) or whole_number:
        raise TextError(f"{where}: field answer: {answer} can be written in two ways: give a text")
    if not isinstance(answer, str | int | float) or not str(answer).strip():
        raise TextError(f"{where}: field answer: an answer is empty or no text; leave it out to "
                        "compare with what the full cache answers")  # fmt: skip
    return str(answer)


def _tokens(given: Any, where: str) -> int | None:
    """`max_new_tokens`, of an answer that the full cache gives."""
    if given is None:
        return None
    text = str(given).removesuffix(".0")  # as pandas writes whole numbers beside empty cells
    if not text.isdecimal() or not 0 < int(text) <= MOST_TOKENS:
        raise TextError(
            f"{where}: field max_new_tokens: give a whole number from 1 to {MOST_TOKENS}, got "
            f"{quoted(given)}"
        )
    return int(text)


def _plain(row: Mapping[str, Any], field: str, where: str) -> str:
    """A text that may be missing."""
    found = row.get(field) or ""
    if not isinstance(found, str):
        raise TextError(f"{where}: field {field}: give a text, got {quoted(found)}")
    return found


def _text(row: Mapping[str, Any], field: str, where: str) -> str:
    found = row.get(field)
    if not isinstance(found, str) or not found.strip():
        raise TextError(f"{where}: field {field}: give a text, got {str(found)[:60]!r}")
    return found


def _lines(file: Path) -> Iterator[tuple[str, Any]]:
    # not splitlines(): a text may have other line ends in it, such as U+2028
    for number, line in enumerate(file.read_text("utf-8-sig").split("\n"), 1):
        if line.strip():
            try:
                yield f"{file}: line {number}", json.loads(line, object_pairs_hook=named_once)
            except ValueError as e:
                at = f"{e.msg}, column {e.colno}" if isinstance(e, json.JSONDecodeError) else e
                raise TextError(f"{file}: line {number} is no JSON: {at}") from e


def _json(file: Path) -> Iterator[tuple[str, Any]]:
    try:
        found = json.loads(file.read_text("utf-8-sig"), object_pairs_hook=named_once)
    except ValueError as e:
        raise TextError(f"{file} is no JSON: {e}; a file with an object a line is .jsonl") from e
    rows = found if isinstance(found, list) else [found]
    yield from ((f"{file}: record {i}", row) for i, row in enumerate(rows, 1))


def _csv(file: Path) -> Iterator[tuple[str, Any]]:
    with open(file, newline="", encoding="utf-8-sig") as f:
        csv.field_size_limit(LONGEST_CELL)
        spaced = ", " in f.readline()  # behind commas, as people write them
        f.seek(0)
        reader = csv.DictReader(f, skipinitialspace=spaced)
        names = [name for name in reader.fieldnames or () if name]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise TextError(f"{file}: line 1: two columns are called {quoted(twice)}; rename one")
        for row in reader:
            where = f"{file}: line {reader.line_num}"
            if None in row:
                raise TextError(f"{where}: more cells than the {len(reader.fieldnames or ())} "
                                "columns; put texts with commas in quotes")  # fmt: skip
            try:
                yield where, {k: cell(k, v) for k, v in row.items() if k}
            except ValueError as e:
                raise TextError(f"{where}: {e}") from e


def _parquet(file: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with file.open("rb") as raw:  # pyarrow takes names in UTF-8 only
            rows = pq.read_table(raw).to_pylist()
    except pa.ArrowException as e:
        raise TextError(f"{file} is no Parquet file: {' '.join(str(e).split())[:200]}") from e
    yield from ((f"{file}: row {i}", row) for i, row in enumerate(rows, 1))


_ROWS: dict[str, Callable[[Path], Iterator[tuple[str, Any]]]] = {
    ".jsonl": _lines,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
}
