"""Progress on stderr: a bar with an ETA on a terminal, a line now and then elsewhere."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

LINE_EVERY = 15.0  # seconds between lines where there is no terminal


class Step(Protocol):
    """One piece of long work."""

    def advance(self, by: float = 1, note: str = "") -> None:
        """Say that `by` of the total is done, and what is known now."""


class Shown:
    """Where progress and sentences go.

    Args:
        quiet: say nothing at all.
    """

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self.console = Console(stderr=True, highlight=False, quiet=quiet, soft_wrap=True)

    def say(self, sentence: str) -> None:
        """Print one sentence."""
        self.console.print(sentence, markup=False)

    @contextmanager
    def step(self, title: str, total: float) -> Iterator[Step]:
        """Show the progress of the work done inside."""
        if self.console.is_terminal and not self.quiet:
            with _bar(self.console) as bar:
                yield _Bar(bar, title, total)
        else:
            yield _Lines(self, title, total)


def _bar(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description:<22}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
    )


class _Bar:
    def __init__(self, bar: Progress, title: str, total: float) -> None:
        self.bar, self.task = bar, bar.add_task(title, total=total, note="")

    def advance(self, by: float = 1, note: str = "") -> None:
        self.bar.advance(self.task, by)
        if note:
            self.bar.update(self.task, note=note)


class _Lines:
    def __init__(self, shown: Shown, title: str, total: float) -> None:
        self.shown, self.title, self.total = shown, title, total
        self.done, self.start, self.last = 0.0, time.monotonic(), 0.0
        shown.say(f"{title}: started")

    def advance(self, by: float = 1, note: str = "") -> None:
        self.done += by
        now = time.monotonic()
        if now - self.last < LINE_EVERY and self.done < self.total:
            return
        self.last = now
        spent = now - self.start
        left = spent / self.done * max(0.0, self.total - self.done) if self.done else 0.0
        line = f"{self.title}: {self.done:g}/{self.total:g}, {spent:.0f} s, about {left:.0f} s left"
        self.shown.say(f"{line}  {note}".rstrip())
