"""What policies are measured on: disjoint parts of workloads, whose items take turns.

An item is a window of a text, or a context with questions. What it loses is counted in nats per
token where there are only windows of one text, and else in shares of what its context is worth: 0
is the full cache, 1 is no context at all. So workloads with losses of any size can be added up,
with weights.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeVar

import numpy as np

from kvsearch.errors import KvsearchError
from kvsearch.workloads.items import Ids, Item, Prompts
from kvsearch.workloads.prompts.files import Record
from kvsearch.workloads.text.windows import Split, shares

T = TypeVar("T")
TEXT = "text"  # the workload of windows


@dataclass(frozen=True, eq=False)
class Part(Prompts):
    """Items of one or several workloads, in turn.

    Attributes:
        of: the workload of each item.
        scales: share of the context per nat of each item's loss, times its weight; none where
            losses are counted in nats per token.
        weights: of each item: the mean over items is then the weighted mean over workloads.
        score_from: of windows, the first scored position.
    """

    of: tuple[str, ...] = ()
    scales: tuple[float, ...] = ()
    weights: tuple[float, ...] = ()
    score_from: int = 1

    @classmethod
    def text(cls, name: str, windows: Ids) -> "Part":
        """Windows `[W, T]` of one text, whose losses are nats per token."""
        items = (Item(f"window {i}", f"window {i}", ids, ()) for i, ids in enumerate(windows))
        return cls(name, tuple(items), of=(TEXT,) * len(windows))

    def __len__(self) -> int:
        return len(self.items)

    @property
    def longest_ids(self) -> Ids:
        """Tokens of the longest item, up to its first answer."""
        item = max(self.items, key=lambda item: item.longest)
        asked = (x for ask in item.asks[:1] for x in (ask.question, ask.answer))
        return np.concatenate([item.context, *asked])

    @property
    def beginnings(self) -> Ids:
        """The first tokens of every context `[items, tokens]`, as many as the shortest has."""
        shortest = min(item.context.size for item in self.items)
        return np.stack([item.context[:shortest] for item in self.items])

    def cut(self, first: int, count: int | None = None) -> "Part":
        """So many items from one on, or all of these."""
        end = len(self) if count is None else min(len(self), first + count)
        return self.only(range(first, end))

    def only(self, numbers: Sequence[int]) -> "Part":
        """The items with these numbers."""

        def some(of: Sequence[T]) -> tuple[T, ...]:
            return tuple(of[i] for i in numbers) if of else ()

        return replace(
            self, items=some(self.items), of=some(self.of), scales=some(self.scales),
            weights=some(self.weights),
        )  # fmt: skip


def require_names(names: Sequence[str]) -> None:
    """Raise if two tasks or files have one name, which is that of their rows in every table."""
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise KvsearchError(f"two workloads are called {twice}; leave one out")


def in_turn(
    name: str,
    workloads: Sequence[Prompts],
    worth: Mapping[str, float],
    weights: Mapping[str, float],
) -> Part:
    """One part of all workloads, an item of each in turn, of each as many as the shortest has.

    Args:
        name: of the part.
        workloads: items of the part, of all workloads.
        worth: nats per token that the context is worth, by workload.
        weights: of the workloads.
    """
    total = sum(weights[w.name] for w in workloads)
    shares = {w.name: weights[w.name] / total * len(workloads) for w in workloads}
    rows = [[(item, w.name) for item in w.items] for w in workloads]
    items, names = zip(*chain.from_iterable(zip(*rows, strict=False)), strict=True)
    return Part(
        name, items, workloads[0].see, names, tuple(shares[n] / worth[n] for n in names),
        tuple(shares[n] for n in names),
    )  # fmt: skip


def divided(
    name: str, records: Sequence[Record], report: Sequence[Record] = (), own: str = ""
) -> dict[Split, list[Record]]:
    """Records of a file in disjoint parts; records of one document are one record already.

    Their order in the file is not that of the parts: files are often sorted.

    Args:
        name: of the file.
        records: all of it.
        report: records of a file of their own, instead of a part of these.
        own: its name.

    Raises:
        KvsearchError: there are too few, or both files have a document.
    """
    seen = {r.group for r in records}
    if both := [r for r in report if r.group in seen]:
        raise KvsearchError(
            f"{own} and {name} have {len(both)} documents in common, such as that of "
            f"{both[0].where}, so a figure would be of prompts that the search saw; leave them out "
            "of one of the two"
        )
    ordered = sorted(records, key=lambda r: r.key)
    found = {
        split: ordered[round(low * len(ordered)) : round(high * len(ordered))]
        for split, (low, high) in shares(apart=bool(report)).items()
    }
    if report:
        found["report"] = sorted(report, key=lambda r: r.key)
    for split, some in found.items():
        short = own if report and split == "report" else name
        if len(some) < 2:
            count = len(report if short == own else records)
            raise KvsearchError(
                f"{short} has {count} document{'s' * (count != 1)}, and a search "
                f"needs about {'10, and 2 to report on' if report else 12}: some to search on, "
                "others to choose on and to report on; `kvsearch eval` measures policies on fewer"
            )
    return found
