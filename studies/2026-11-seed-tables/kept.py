"""Pairs of methods in runs that other studies keep: nothing was measured again for them.

The runs compared all methods at equal peak bytes, scores counted. Rows of `study` have windows of
4096 tokens, scored from `slots` on; the six texts of the first command windows of 1536.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvsearch.results.folder import RunFolder
from kvsearch.results.intervals import Blocks, common

STUDIES = Path(__file__).resolve().parent.parent
PAIRS = (("lacache", "streamingllm"), ("xmu-evict", "h2o"))
OUTCOME = {"128": "b128", "192": "b192", "256": "b256", "384": "b384-two-windows"}
PARTS = {"WikiText-2": "report", "sotu": "also0"}
TEXTS = ("built-in", "wikitext-1", "wikitext-2", "wikitext-3", "sotu-1", "sotu-2")


@dataclass(frozen=True)
class Pair:
    """Losses of two methods on the windows that both have."""

    study: str
    slots: str
    text: str
    names: tuple[str, str]
    losses: tuple[Blocks, Blocks]


def pairs() -> Iterator[Pair]:
    """All pairs, by method."""
    for names in PAIRS:
        for slots, folder in OUTCOME.items():
            run = STUDIES / "2026-11-outcome" / folder
            for text, part in PARTS.items():
                if (found := both(run, part, names)) is not None:
                    yield Pair("2026-11-outcome", slots, text, names, found)
        six = [
            both(STUDIES / "2026-11-first-command" / "records" / text, part, names)
            for text in TEXTS
            for part in ("search", "report")
        ]
        known = [x for x in six if x is not None]
        joined = tuple(joint([x[i] for x in known]) for i in (0, 1))
        yield Pair("2026-11-first-command", "256", "six texts", names, (joined[0], joined[1]))


def both(folder: Path, part: str, names: tuple[str, str]) -> tuple[Blocks, Blocks] | None:
    """Losses of two methods in one part of a run; None where one of them has none there."""
    run = RunFolder(folder, write=False)
    trials = [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]
    of = {trial["name"]: trial["fingerprint"] for trial in trials}
    start = json.loads((folder / "study.json").read_text())["settings"]["score_from"] - 1
    if not all(name in of and run.has_losses(part, of[name]) for name in names):
        return None
    a, b = (run.losses(part, of[name], start) for name in names)
    return common(a, b)


def joint(each: list[Blocks]) -> Blocks:
    """Windows of several texts."""
    return Blocks(np.concatenate([x.sums for x in each]), each[0].tokens)
