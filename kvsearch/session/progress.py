"""Progress on stderr: a bar with an ETA on a terminal, a line now and then elsewhere.

Above the bar stands what is known by then, if there is something to know.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from kvsearch.report.screen import folded

LINE_EVERY = 15.0  # seconds between lines where there is no terminal
STANDING_EVERY = 60.0  # seconds between what is known by then, there


class TimeUp(KeyboardInterrupt):
    """`--minutes` are over: the work ends as after Ctrl-C."""


class Step(Protocol):
    """One piece of long work."""

    def advance(self, by: float = 1, note: str = "") -> None:
        """Say that `by` of the total is done, and what is known now."""


class Shown:
    """Where progress and sentences go.

    Args:
        quiet: say nothing at all.
        minutes: after which the next step of any work raises `TimeUp`; None: never.
    """

    def __init__(self, quiet: bool = False, minutes: float | None = None) -> None:
        self.quiet = quiet
        self.end = None if minutes is None else time.monotonic() + 60 * minutes
        self._standing = Text(no_wrap=True, overflow="ellipsis")
        self._stood = -STANDING_EVERY
        self.console = Console(stderr=True, highlight=False, quiet=quiet, soft_wrap=True)

    def say(self, sentence: str) -> None:
        """Print one sentence; on a terminal in lines that end between words."""
        width = self.console.width if self.console.is_terminal else None
        self.console.print("\n".join(folded(sentence.split("\n"), width)), markup=False)

    def stand(self, lines: list[str]) -> None:
        """Show what is known by now: above the bar, or as lines now and then."""
        self._standing.plain = "\n".join(lines)
        now = time.monotonic()
        if not self._live and now - self._stood >= STANDING_EVERY:
            self._stood = now
            self.say(self._standing.plain)

    def check_time(self) -> None:
        """Raise `TimeUp` once the minutes are over."""
        if self.end is not None and time.monotonic() >= self.end:
            raise TimeUp

    @contextmanager
    def step(self, title: str, total: float, at_most: bool = False) -> Iterator[Step]:
        """Show the progress of the work done inside; `at_most`: it may end before the total."""
        self.check_time()
        if self._live:
            bar = _bar(at_most, self.console.width)
            with Live(Group(self._standing, bar), console=self.console, transient=True):
                yield _Bar(self, bar, title, total)
            self.console.print(bar)
        else:
            yield _Lines(self, title, total, at_most)

    @property
    def _live(self) -> bool:
        return self.console.is_terminal and not self.quiet


def _bar(at_most: bool, width: int) -> Progress:
    """What fits in a line of so many letters: counts and times first, then a bar, then a note."""
    whole = Column(no_wrap=True)  # never shortened
    left = [TextColumn("left"), TimeRemainingColumn(table_column=whole)] if not at_most else []
    bar = [BarColumn(bar_width=min(24, width - 56))] if width >= 64 else []
    note = [TextColumn("{task.fields[note]}")] if width >= 100 else []
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description:<22}" if bar else "{task.description}"),
        *bar,
        MofNCompleteColumn(table_column=whole),
        TimeElapsedColumn(table_column=whole),
        *(left if width >= 56 else []),
        *note,
    )


class _Bar:
    def __init__(self, shown: Shown, bar: Progress, title: str, total: float) -> None:
        self.shown = shown
        self.bar, self.task = bar, bar.add_task(title, total=total, note="")

    def advance(self, by: float = 1, note: str = "") -> None:
        self.bar.advance(self.task, by)
        if note:
            self.bar.update(self.task, note=note)
        self.shown.check_time()


class _Lines:
    def __init__(self, shown: Shown, title: str, total: float, at_most: bool) -> None:
        self.shown, self.title, self.total, self.at_most = shown, title, total, at_most
        self.done, self.start, self.last = 0.0, time.monotonic(), 0.0
        shown.say(f"{title}: started")

    def advance(self, by: float = 1, note: str = "") -> None:
        self.done += by
        self.shown.check_time()
        now = time.monotonic()
        if now - self.last < LINE_EVERY and self.done < self.total:
            return
        self.last = now
        spent = now - self.start
        line = f"{self.title}: {self.done:g}/{self.total:g}, {spent:.0f} s"
        if self.done and not self.at_most:
            left = spent / self.done * max(0.0, self.total - self.done)
            line += f", about {left:.0f} s left"
        self.shown.say(f"{line}  {note}".rstrip())
