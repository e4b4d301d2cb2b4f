"""Texts that are data: JSON lines, JSON, CSV and files of other programs, recognised by content.

A search needs running text. Braces, field names and separators would be evaluated like words.
"""

import csv
import json
import re
import sys
from collections.abc import Sequence
from itertools import islice

MAGIC = (  # how files of other kinds begin
    (b"PAR1", "a Parquet file"),
    (b"ARROW1", "an Arrow file"),
    (b"\x1f\x8b", "a gzip file"),
    (b"PK\x03\x04", "a zip archive, as .docx, .xlsx and .epub are"),
    (b"%PDF", "a PDF file"),
    (b"{\\rtf", "an RTF document"),
    (b"SQLite format 3", "an SQLite database"),
    (b"BZh", "a bzip2 file"),
    (b"\xfd7zXZ", "an xz file"),
    (b"\x28\xb5\x2f\xfd", "a zstd file"),
    (b"7z\xbc\xaf", "a 7z archive"),
    (b"\xd0\xcf\x11\xe0", "an old Microsoft Office file"),
    (b"\x93NUMPY", "a NumPy array"),
    (b"GGUF", "a GGUF model"),
    (b"\x80\x04", "a pickle"),
    (b"\xff\xfe", "text in UTF-16"),
    (b"\xfe\xff", "text in UTF-16"),
)
HEAD = 4 << 20  # characters at the beginning whose lines are looked at
SAMPLE = 200  # lines that are parsed, spread over these
MOST = 0.9  # share of the lines from which all are taken for records
ROWS = 5  # lines from which equal numbers of cells are no chance
FIELDS = frozenset("id text title content body sentence prompt question answer label url".split())
_KEY = re.compile(r'\s*"(?:[^"\\]|\\.)*"\s*:')
_REST = re.compile(r'[\s\[\]{},]+|\s*(?:"(?:[^"\\]|\\.)*"|-?[\d.eE+-]+|true|false|null)\s*,?\s*')
_PYTHON = re.compile(r"\{\s*'\w+'\s*:.*\}", re.DOTALL)
_NUMBER = re.compile(r"[-+]?(\d[\d_]*\.?\d*([eE][-+]?\d+)?|\.\d+|nan|inf|0x[\da-fA-F]+)")
_NAME = re.compile(r"[\w.\-/()%#:@ ]{1,40}")
_TAG = re.compile(r"<(\?xml|!doctype|[a-z][\w:.-]*)\b[^>]*>", re.IGNORECASE)
_MARKS = {
    ",": "comma-separated values (CSV)",
    "\t": "tab-separated values (TSV)",
    ";": "semicolon-separated values (CSV)",
    "|": "values separated by |",
}


def binary(raw: bytes) -> str:
    """What a file that begins like this is, if it is of another program; else empty."""
    return next((what for magic, what in MAGIC if raw.startswith(magic)), "")


def markup(text: str) -> str:
    """`HTML` or `XML` of a text that is one document of it; else empty."""
    found = _TAG.match(text.lstrip("\ufeff \t\r\n"))
    if found is None:
        return ""
    name = found[1].lower()
    if name in ("html", "!doctype"):
        return "HTML"
    whole = text[-200:].rstrip().lower().endswith(f"</{name}>")
    return "XML" if name == "?xml" or whole else ""


def data(text: str) -> tuple[str, str] | None:
    """What a text is if it is data, and a command that takes texts out of a FILE of it.

    Prose and Markdown that begin with a brace, or contain tables and lists, are no data.

    Returns:
        Such as `JSON lines (JSONL)` and `jq -r .text FILE > text.txt`; None of other texts.
    """
    lines = [line for line in text[:HEAD].splitlines() if line.strip()]
    return _json_lines(lines) or _json(text.strip("\ufeff \t\r\n"), lines) or _cells(lines)


# -- JSON ----------------------------------------------------------------------------------------


def _json_lines(lines: Sequence[str]) -> tuple[str, str] | None:
    """Nearly every line is an object or a list; a range may cut the first and the last."""
    if len(lines) < 2 or sum(line.strip()[0] in "{[" for line in lines) < MOST * len(lines):
        return None
    sample = list(islice(lines, 0, None, max(1, len(lines) // SAMPLE)))
    records = [x for line in sample if (x := _parsed(line.strip().rstrip(","))) is not None]
    if not records or len(records) < MOST * len(sample) - 1:
        return None
    return "JSON lines (JSONL)", f"jq -r '{_longest(records[0])}' FILE > text.txt"


def _json(text: str, lines: Sequence[str]) -> tuple[str, str] | None:
    """One JSON value, or several one after the other, or a part of one with its keys."""
    if text[:1] in ("{", "["):
        try:
            found, end = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError):
            found, end = None, 0
        rest = text[end:].lstrip(" \t\r\n,")[:1]
        if found and (not rest or (isinstance(found, dict) and rest == "{")):
            listed = isinstance(found, list)
            field = f".[] | {_longest(found[0])}" if listed else _longest(found)
            return "JSON", f"jq -r '{field}' FILE > text.txt"
    keys = sum(_KEY.match(line) is not None for line in lines)
    others = sum(_REST.fullmatch(line) is not None for line in lines)
    if keys >= ROWS and others and keys + others >= len(lines) - 2:  # cut at both ends
        return "a part of a JSON file", "jq -r '.. | strings' FILE > text.txt"
    return None


def _parsed(text: str) -> object | None:
    """An object or a list, as JSON or as Python writes it; None of anything else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {} if _PYTHON.fullmatch(text) else None
    return found if isinstance(found, dict | list) else None


def _longest(record: object) -> str:
    """jq's name of the field with the longest text; of all texts where it is nested."""
    if not isinstance(record, dict) or not record:
        return ".. | strings"
    name = max(record, key=lambda k: len(str(record[k])))
    if not isinstance(record[name], str):
        return ".. | strings"
    return f".{name}" if re.fullmatch(r"[A-Za-z_]\w*", name) else f".[{json.dumps(name)}]"


# -- cells ---------------------------------------------------------------------------------------


def _cells(lines: Sequence[str]) -> tuple[str, str] | None:
    """Rows of as many cells, or rows under a row of names of fields."""
    for mark, what in _MARKS.items():
        if len(lines) > 1 and mark in lines[0] and _rows(lines, mark):
            sep = "" if mark == "," else f", sep={mark!r}"
            read = f"pandas.read_csv('FILE'{sep})['COLUMN']"
            return what, f"python -c \"import pandas; print(*{read}, sep='\\n\\n')\" > text.txt"
    return None


def _rows(lines: Sequence[str], mark: str) -> bool:
    before = csv.field_size_limit(sys.maxsize)
    each = (f"{line}\n" for line in lines)
    try:
        if mark == "\t":
            rows = list(csv.reader(each, delimiter=mark, quoting=csv.QUOTE_NONE))
        else:
            rows = list(csv.reader(each, delimiter=mark))
    except csv.Error:
        return False
    finally:
        csv.field_size_limit(before)
    names, width = [cell.strip() for cell in rows[0]], len(rows[0])
    if len(rows) < 2 or (mark == "|" and not names[0]):  # which is Markdown's table
        return False
    even = sum(len(row) == width for row in rows) >= MOST * len(rows) - 1
    if mark == "\t" and even and len(rows) >= ROWS:
        return True
    header = len(set(names)) == width and all(_NAME.fullmatch(cell) for cell in names)
    if header and not FIELDS.isdisjoint(cell.lower() for cell in names):
        return sum(len(row) >= width for row in rows) >= MOST * len(rows)
    later = [cell for row in rows for cell in row[1:]]
    if 2 * sum(not cell.strip() for cell in later) > len(later):  # lines of code that end in commas
        return False
    if 2 * sum(cell.startswith(" ") for cell in later) > len(later):  # as behind a comma in prose
        return even and len(rows) >= ROWS and 2 * sum(map(_number, later)) > len(later)
    return even and len(rows) >= ROWS and (header or width > 2 or any(map(_number, later)))


def _number(cell: str) -> bool:
    return _NUMBER.fullmatch(cell.strip()) is not None
