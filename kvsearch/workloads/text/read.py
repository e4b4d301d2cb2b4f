"""Text from files, and the built-in corpus for a machine that has none."""

import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from kvsearch.errors import TextError, named, quoted
from kvsearch.workloads.text.datasets import DATASETS
from kvsearch.workloads.text.markup import binary, data, markup
from kvsearch.workloads.text.source import Source, Text

LARGEST = 256 << 20  # bytes of one file or range; a tokenizer takes about 1 s per MB
_RANGE = re.compile(r"(?P<file>.+):(?P<start>(?:\d[\d_]*)?)-(?P<end>(?:\d[\d_]*)?)")
TextLike = str | os.PathLike[str] | Text
_LONG = 60  # characters from which a repeated paragraph is a copy, not a phrase like "Note:"


def read_files(specs: Sequence[TextLike]) -> Source:
    """Several files, or texts themselves, as one text with an empty line between them.

    Args:
        specs: each a `Text`, or a path as for `read_file`.

    Raises:
        TextError: one of them cannot be read, or there are none.
    """
    if not specs:
        raise TextError("no text file given; give --text FILE")
    sources = [read_text(spec) for spec in specs]
    if len(sources) == 1:
        return sources[0]
    name = "+".join(s.name for s in sources)
    text = "\n\n".join(s.text for s in sources)
    return Source.of(name, text, f"text: {len(sources)} files, {len(text):,} characters")


def read_text(spec: TextLike) -> Source:
    """A `Text`, or a file or byte range as for `read_file`.

    Raises:
        TextError: it cannot be read, or holds nothing.
    """
    if not isinstance(spec, Text):
        return read_file(os.fspath(spec))
    if not isinstance(spec.text, str):
        kind = type(spec.text).__name__
        raise TextError(f"the text of kvsearch.Text(...) is a string, not of type {kind}")
    if not spec.text.strip():
        raise TextError(f"the text {quoted(spec.name)} is empty; give a longer one")
    return Source.of(spec.name, spec.text, f"text: {spec.name}, {len(spec.text):,} characters")


def read_file(spec: str) -> Source:
    """A UTF-8 text file, or a range of its bytes.

    Args:
        spec: `FILE`, or `FILE:START-END` in bytes, either of which may be left out. Both ends
            move forward to the next start of a line, so ranges that share an end are disjoint
            and leave nothing between them. A file whose name looks like that is taken whole.

    Raises:
        TextError: there is no such file, it is not text but data, or the range is empty or too
            large.
    """
    path, found = located(spec)
    start, end = (found[k].replace("_", "") if found else "" for k in ("start", "end"))
    try:
        with path.open("rb") as f:
            raw, first, last = _bytes(f, int(start or 0), int(end) if end else None, spec)
    except OSError as error:
        why = error.strerror or "it is a pipe; save what it gives to a file"
        raise TextError(f"{path} cannot be read: {why}") from error
    if first == 0 and (kind := binary(raw)):
        raise TextError(f"{path} is not UTF-8 text but {kind}; write its text into a plain file")
    try:
        text = raw.decode("utf-8-sig" if first == 0 else "utf-8")
    except UnicodeDecodeError as error:
        raise TextError(
            f"{path} is not UTF-8 text (byte {first + error.start:,} is 0x{raw[error.start]:02x}); "
            "convert it, or give another file"
        ) from error
    if "\0" in text:
        raise TextError(f"{path} is not text: it has zero bytes")
    if not text.strip():
        raise TextError(f"{spec} holds no text")
    if found_data := data(text):
        kind, command = found_data
        raise TextError(
            f"{path} looks like {kind}, whose field names and separators would be evaluated as "
            "text: write the texts into a plain file, as with "
            f"`{command.replace('FILE', shlex.quote(str(path)))}`, and give that, or, where its "
            "records are prompts, give it with --prompts to `kvsearch eval`"
        )
    name = f"{path.name}:{first}-{last}" if found else path.name
    return Source.of(name, text, f"text: {path}, bytes {first:,} to {last:,}{_tags(text)}")


def _tags(text: str) -> str:
    """A warning for what is said about a text with tags, which a model may well see, too."""
    kind = markup(text)
    return f"; warning: it looks like {kind}, whose tags are evaluated as text" if kind else ""


def located(spec: str) -> tuple[Path, re.Match[str] | None]:
    """The file of `FILE` or `FILE:START-END`, and the range as it was matched.

    Raises:
        TextError: there is no such file, or it is a folder.
    """
    path = Path(os.path.expanduser(spec))
    found = None if os.path.isfile(path) else _RANGE.fullmatch(spec)
    if found:
        path = Path(os.path.expanduser(found["file"]))
    if os.path.isdir(path):
        raise TextError(f"{path} is a folder; name the text files in it")
    if not os.path.exists(path):  # false also of a name that is too long, as of a text itself
        raise TextError(f"there is no text file {_meant(spec, path)}")
    return path, found


def _bytes(f: BinaryIO, start: int, end: int | None, spec: str) -> tuple[bytes, int, int]:
    """Content of the range and its two ends, each moved to the start of a line."""
    size = f.seek(0, 2)

    def line(at: int) -> int:
        if 0 < at < size:
            f.seek(at - 1)  # so that a place which starts a line already stays
            f.readline()
            return f.tell()
        return min(at, size)

    first, last = line(start), size if end is None else line(end)
    if last <= first:
        raise TextError(f"{spec} is empty: the file has {size:,} bytes")
    if last - first > LARGEST:
        raise TextError(
            f"{spec} has {(last - first) / 1e6:,.0f} MB, more than a search can use; "
            "give a part of it as FILE:0-50000000"
        )
    f.seek(first)
    return f.read(last - first), first, last


def _meant(spec: str, path: Path) -> str:
    """The name of no file, and what to give instead."""
    if spec in DATASETS:
        return f"{spec}; the dataset of that name is --dataset {spec}"
    if re.search(r"\s", spec) or not re.search(r"[./\\]", spec):  # no name as files have them
        return f"{quoted(spec)}; name one, or in Python give a text itself as kvsearch.Text(...)"
    return named(path)


def builtin() -> Source:
    """The language reference that comes with every Python: 0.4 MB of technical English.

    Topics are in alphabetical order. Some repeat whole sections of others; a paragraph stays in
    the longest topic that has it only, so that the parts of a split do not share text.

    Raises:
        TextError: this Python comes without its documentation topics.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise TextError("this Python has no built-in corpus; give --text FILE") from error
    seen: set[str] = set()
    kept: dict[str, str] = {}
    for key in sorted(topics, key=lambda k: (-len(topics[k]), k)):
        fresh = []
        for paragraph in topics[key].strip().split("\n\n"):
            same = paragraph.strip()
            if same not in seen:
                fresh.append(paragraph)
            if len(same) >= _LONG:
                seen.add(same)
        kept[key] = "\n\n".join(fresh)
    text = "\n\n\n".join(kept[key] for key in sorted(kept) if kept[key])
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return Source.of(
        f"builtin-python{version}",
        text,
        f"no text given: using the language reference inside Python {version} "
        f"(pydoc_data.topics, {len(text) / 1e6:.1f} MB of technical English); "
        "--text FILE with text like what the model will see gives policies that fit it",
    )
