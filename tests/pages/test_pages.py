"""The pages: no words left to fill in, tables that render, and the floors as they are checked."""

import re
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("studies/*/README.md")]
_CODE = re.compile(r"^( *)```.*?^\1```|``.*?``|`[^`]*`|\]\([^)]*\)|<!--.*?-->", re.S | re.M)
_MARKS = re.compile(r"\?\?\?|\bX\.XX?\b|\bNN+\b|\bN\.N+\b|\{\{|\}\}|<[A-Z_ ]+>|\b(lorem ipsum)\b")
_TO_DO = re.compile(r"\b(TODO|TBD|TBA|FIXME|XXX+|PLACEHOLDER|FILL[- ]?IN)\b", re.IGNORECASE)
OFTEN = 4  # times as often as in capitals
_DELIMITER = re.compile(r"\|(\s*:?-+:?\s*\|)+")


def prose(page: str) -> str:
    """A page without code, targets of links and comments; lines keep their numbers."""
    return _CODE.sub(lambda found: "\n" * found[0].count("\n"), page)


def unfilled(page: str, words: Counter[str]) -> list[str]:
    """Words that stand for a figure: capitals of what the pages write in small letters.

    Abbreviations stand in capitals often; what programs write so is code.

    Args:
        page: its text.
        words: of all pages, how often.
    """
    text = prose(page)
    capitals = re.findall(r"\b[A-Z]{3,}\b", text)
    wanted = [w for w in capitals if words[w.lower()] > OFTEN * words[w]]
    return [*wanted, *(m[0] for m in _MARKS.finditer(text)), *(m[0] for m in _TO_DO.finditer(text))]


def broken(page: str) -> list[str]:
    """Rows of tables that render as text, or whose cells are not those of the first row."""
    blank = _CODE.sub(lambda m: m[0] if "\n" not in m[0] else "\n" * m[0].count("\n"), page)
    lines = [line.strip() for line in blank.splitlines()]
    found, width = [], 0
    for before, line, after in zip(["", *lines], lines, [*lines[1:], ""], strict=False):
        if not line.startswith("|"):
            continue
        cells = len(re.findall(r"(?<!\\)\|", line)) - 1
        if not before.startswith("|"):
            width = cells
            if not _DELIMITER.fullmatch(after) or (before and not before.startswith("<!--")):
                found.append(line)
        if cells != width or not line.endswith("|"):
            found.append(line)
    return found


@cache
def vocabulary() -> Counter[str]:
    """Words in small letters and in capitals, of all pages."""
    words = re.compile(r"\b(?:[a-z]{3,}|[A-Z]{3,})\b")
    return Counter(w for p in PAGES for w in words.findall(prose(p.read_text("utf-8"))))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_pages_are_filled_in_and_their_tables_render(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not unfilled(text, vocabulary())
    assert not broken(text)


WORDS = Counter(ratio=7, RATIO=1, figure=9, seconds=9, ppl=1, PPL=20)


@pytest.mark.parametrize(
    "text",
    ["it is RATIO (3 pairs", "took SECONDS", "TODO: measure", "about N.NN times", "is ??? today",
     "in {{ seconds }}", "as <FIGURE> says", "tbd"],
)  # fmt: skip
def test_what_is_not_filled_in_is_found(text: str) -> None:
    assert unfilled(f"Of all pages\n{text} and so on.", WORDS)


def test_what_is_no_gap_is_not() -> None:
    text = "PPL on a CPU with `--text FILE` and [a link](RATIO.md)\n\n```\nRATIO=1\n```\n"
    assert not unfilled(text, WORDS)


TABLE = "| a | b |\n|---|---|\n| 1 | 2 |\n"


@pytest.mark.parametrize(
    "text",
    [
        f"{TABLE}\n| 3 | 4 |\n",  # cut off by an empty line
        f"text\n{TABLE}",  # part of a paragraph
        "| a | b |\n| 1 | 2 |\n",
        f"{TABLE}| 3 |\n",
        f"{TABLE}| 3 | 4 | 5 |\n",
        f"{TABLE}| 3 | 4\n",
        "| a | b |\n|---|\n| 1 | 2 |\n",
    ],
)
def test_tables_that_do_not_render_are_found(text: str) -> None:
    assert broken(text)


def test_tables_that_render_are_not() -> None:
    indented = "  " + TABLE.replace("1", "x \\| y").replace("\n", "\n  ")
    assert not broken(f"text\n\n{TABLE}\n```\n| 1 |\n```\n\n{indented}")


def test_the_floors_are_those_that_lint_imports_checks() -> None:
    lint = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (layers,) = [c["layers"] for c in lint["contracts"] if c["name"].startswith("floors")]
    floors = [{x.strip().removeprefix("kvsearch.") for x in row.split("|")} for row in layers]
    page = (ROOT / "docs" / "README.md").read_text()
    (drawn,) = re.findall(r"```\n(cli -> .*?)\n```", page, re.S)
    assert [set(re.findall(r"\w+", part)) for part in drawn.split("->")] == floors
    named = set().union(*floors)
    packages = {p.parent.name for p in (ROOT / "kvsearch").glob("*/__init__.py")}
    assert packages <= named
