"""Texts that are data are told apart from texts, and the sentence says how to get texts out."""

import csv
import io
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

import kvsearch
from kvsearch import Text
from kvsearch.errors import TextError
from kvsearch.workloads.text import builtin, read_files
from kvsearch.workloads.text.markup import MAGIC, data, markup

LONG = 'It was the best of times, it was the worst of times; "so" it goes.\nA new line.'
ROWS = [{"id": i, "text": f"{LONG} {i}", "tags": ["a", "b"]} for i in range(20)]


def table(mark: str, rows: list[list[Any]], **how: Any) -> str:
    out = io.StringIO()
    csv.writer(out, delimiter=mark, lineterminator="\n", **how).writerows(rows)
    return out.getvalue()


LINES = "\n".join(map(json.dumps, ROWS))
DATA = {
    "JSONL": (LINES, "JSON lines (JSONL)"),
    "JSONL, cut": (LINES[9:-9], "JSON lines (JSONL)"),
    "JSONL of chats": (
        "\n".join(json.dumps({"messages": [{"role": "user", "content": LONG}]}) for _ in range(9)),
        "JSON lines (JSONL)",
    ),
    "JSONL of lists": ("\n".join(json.dumps([i, LONG]) for i in range(9)), "JSON lines (JSONL)"),
    "Python dicts": ("\n".join(repr(row) for row in ROWS), "JSON lines (JSONL)"),
    "JSON list": (json.dumps(ROWS), "JSON"),
    "JSON object": (json.dumps({"data": ROWS}), "JSON"),
    "JSON, indented": ("\ufeff" + json.dumps(ROWS, indent=2), "JSON"),
    "JSON, one after the other": ("\n".join(json.dumps(r, indent=1) for r in ROWS), "JSON"),
    "JSON, cut": (json.dumps(ROWS, indent=2)[30:-50], "a part of a JSON file"),
    "CSV": (table(",", [["id", "text"], *([i, LONG] for i in range(9))]), "(CSV)"),
    "CSV, three rows": (table(",", [["id", "text"], [1, LONG], [2, LONG]]), "(CSV)"),
    "CSV, not quoted": ("id,text\n" + "".join(f"{i},So, {i}, no\n" for i in range(9)), "(CSV)"),
    "CSV without names": (table(",", [[i, LONG, "x"] for i in range(9)]), "(CSV)"),
    "CSV of hexadecimal numbers": ("\n".join(f"{i}, {i * i:#x}" for i in range(50)), "(CSV)"),
    "CSV of numbers": ("\n".join(f"{i}, {i * i}, {i / 7}" for i in range(50)), "(CSV)"),
    "CSV of a long text": (table(",", [["a", "body"], [1, LONG * 4000], [2, LONG]]), "(CSV)"),
    "semicolons": (table(";", [["name", "value"], *([f"n{i}", i] for i in range(9))]), "(CSV)"),
    "TSV": (table("\t", [["en", "de"], *(["A house.", "Ein Haus."] for _ in range(9))]), "(TSV)"),
    "TSV, stray quotes": ('a "b\tc\n' * 30, "(TSV)"),
}  # fmt: skip
TEXTS = {
    "a brace": "{ This is how the manuscript begins.\nAnd goes on. " * 50,
    "a valid object, then prose": '{"a": 1}\n' + "Then the author explains it. " * 90,
    "footnotes": "\n".join(f"[{i}] Smith, J., A Book, [Online]" for i in range(60)),
    "subtitles": "\n".join(f"[00:0{i % 10}] and then, she said" for i in range(60)),
    "Markdown": "# Title\n\n| a | b |\n|---|---|\n" + "| x, y | 2 |\n" * 20 + "\nProse.\n",
    "a Markdown table": "| a | b |\n|---|---|\n" + "| x | 2 |\n" * 40,
    "a page of commands": "To list them:\n\n    aws list\n\nOutput::\n\n"
    + json.dumps({"found": [{"name": f"n{i}", "size": i} for i in range(40)]}, indent=4),
    "imports": "# Copyright (c) A. Company, Inc.\n" + "    name,\n" * 60,
    "a poem": "\n".join("Shall I compare thee, to a summer day" for _ in range(14)),
    "Markdown with JSON": 'Use:\n\n```json\n{\n  "a": 1,\n  "b": 2\n}\n```\n\nIt works.\n' * 9,
    "dialogue": "\n".join(f'"Go," he said {i} times, "now!"' for i in range(40)),
    "a list": "\n".join(f"item {i}" for i in range(40)),
    "numbers": " ".join(str(i * i) for i in range(3000)),
    "code": Path(__file__).read_text(),
    "the license": (Path(__file__).parents[2] / "LICENSE").read_text(),
}  # fmt: skip


@pytest.mark.parametrize("case", DATA)
def test_data_are_refused_and_the_sentence_says_what_they_look_like(
    case: str, tmp_path: Path
) -> None:
    text, kind = DATA[case]
    file = tmp_path / "mine.txt"  # names say nothing
    file.write_text(text)
    with pytest.raises(TextError) as caught:
        kvsearch.evaluate("full", "no model is loaded before that", str(file))
    said = str(caught.value)
    assert said.startswith(f"{file} looks like ") and kind in said and "\n" not in said
    assert (
        "write the texts into a plain file, as with `" in said and "give it with --prompts" in said
    )
    with pytest.raises(TextError, match="looks like"):
        kvsearch.search(text=Text("word " * 900), report_text=str(file))
    with pytest.raises(TextError, match="looks like"):
        kvsearch.search(text=Text("word " * 900), extra_text=[str(file)])
    assert read_files([Text(text)]).text == text  # who gives a text itself means it


@pytest.mark.parametrize("case", TEXTS)
def test_texts_are_no_data(case: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(TEXTS[case])
    assert read_files([str(file)]).text == TEXTS[case]
    assert not markup(TEXTS[case])


def test_the_documentation_and_the_built_in_text_are_no_data() -> None:
    pages = list((Path(__file__).parents[2] / "docs").rglob("*.md"))
    assert len(pages) > 20 and data(builtin().text) is None
    assert not [p for p in pages if data(p.read_text()) or markup(p.read_text())]


def test_the_command_takes_the_field_of_the_texts_out(tmp_path: Path) -> None:
    found = data("\n".join(json.dumps({"a-b": LONG, "n": 1}) for _ in range(3)))
    assert found == ("JSON lines (JSONL)", """jq -r '.["a-b"]' FILE > text.txt""")
    found = data(json.dumps(ROWS))
    assert found == ("JSON", "jq -r '.[] | .text' FILE > text.txt")
    found = data(DATA["CSV"][0])
    assert found is not None
    file = tmp_path / "mine.csv"
    file.write_text(DATA["CSV"][0])
    command = found[1].replace("FILE", str(file)).replace("COLUMN", "text")
    subprocess.run(command, shell=True, cwd=tmp_path, check=True, timeout=120)
    assert (tmp_path / "text.txt").read_text() == "\n\n".join([LONG] * 9) + "\n"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("<!DOCTYPE html>\n<html><body>Hello</body></html>", "HTML"),
        ("<html lang='en'>\n<p>Hello</html>", "HTML"),
        ("<?xml version='1.0'?>\n<a>Hello</a>", "XML"),
        ("\n<doc id='1'>\nHello there\n</doc>\n", "XML"),
    ],
)
def test_tags_are_a_warning(text: str, kind: str, tmp_path: Path) -> None:
    file = tmp_path / "page"
    file.write_text(text)
    assert read_files([str(file)]).announcement.endswith(
        f"; warning: it looks like {kind}, whose tags are evaluated as text"
    )


@pytest.mark.parametrize(("magic", "kind"), MAGIC)
def test_files_of_other_programs_are_named(magic: bytes, kind: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_bytes(magic + b" and more")
    with pytest.raises(TextError, match=f"is not UTF-8 text but {kind}"):
        read_files([str(file)])
