"""Tables and sentences as wide as a terminal; elsewhere lines are as long as they are."""

import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

NARROWEST = 8  # letters of the first column


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        title: its first line.
        width: letters, longer cells push what follows.
        left: cells begin at its left.
        drop: columns with a larger number go first where not all fit; 0 never goes.
        brief: where the others still do not fit, cells end before their brackets.
    """

    title: str
    width: int
    left: bool = False
    drop: int = 0
    brief: bool = False

    def cell(self, text: str, width: int) -> str:
        """Text at its place."""
        return f"{text:<{width}}" if self.left else f"{text:>{width}}"


def columns_of(stream: TextIO | None) -> int | None:
    """Letters of a line on a terminal; None where the stream is none, or is closed."""
    return shutil.get_terminal_size().columns if stream is not None and stream.isatty() else None


def printed() -> int | None:
    """Of what is printed as the result."""
    return columns_of(sys.stdout)


def table(
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    width: int | None,
    notes: Sequence[str] = (),
) -> list[str]:
    """Lines of a table, the titles first.

    Args:
        columns: the first names the row, and is cut where nothing else helps.
        rows: a cell for each column.
        width: letters of a line; None has no limit.
        notes: one a row, behind it, or below it where there is no room; empty has none.
    """
    kept = list(range(len(columns)))
    widths = [c.width for c in columns]
    cells = [[c.title for c in columns], *map(list, rows)]

    def over() -> int:
        return 0 if width is None else sum(widths[i] for i in kept) - width

    while over() > 0 and any(columns[i].drop for i in kept):
        kept.remove(max(kept, key=lambda i: columns[i].drop))
    if over() > 0 and any(columns[i].brief for i in kept):
        cells = [_brief(row, columns) for row in cells]
        for i in (i for i in kept if columns[i].brief):
            widths[i] = max(len(row[i].rstrip()) for row in cells) + 2
    if over() > 0:
        widths[0] = max(NARROWEST, widths[0] - over())
        cells = [[shortened(row[0], widths[0] - 1), *row[1:]] for row in cells]
    lines = []
    for row, note in zip(cells, ["", *(notes or [""] * len(rows))], strict=True):
        line = "".join(columns[i].cell(row[i], widths[i]) for i in kept).rstrip()
        fits = width is None or len(line) + 2 + len(note) <= width
        lines.append(f"{line}  {note}" if note and fits else line)
        if note and not fits:
            lines += folded([f"    {note}"], width)
    return lines


def folded(lines: Sequence[str], width: int | None) -> list[str]:
    """Sentences in lines of at most so many letters, further ones two letters to the right."""
    if width is None:
        return list(lines)
    out: list[str] = []
    for line in lines:
        indent = " " * (len(line) - len(line.lstrip()))
        parts = textwrap.wrap(
            line.strip(), max(width, 20), initial_indent=indent, subsequent_indent=f"{indent}  ",
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
        out += parts or [""]
    return out


def _brief(row: Sequence[str], columns: Sequence[Column]) -> list[str]:
    """Cells without their brackets, also round ones of titles."""
    plain = (cell.partition(" [")[0].partition(" (")[0] for cell in row)
    return [short if c.brief else cell for c, cell, short in zip(columns, row, plain, strict=True)]


def shortened(text: str, most: int) -> str:
    """Text of at most so many letters, with dots where some are missing."""
    return text if len(text) <= most else f"{text[: most - 1]}…"
