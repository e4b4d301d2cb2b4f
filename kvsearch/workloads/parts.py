"""Workloads as a search measures them: disjoint parts, whose items take turns between workloads.

What an item loses is counted in shares of what its context is worth: 0 is the full cache, 1 is no
context at all. So workloads with answers of any difficulty can be added up, with weights.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from kvsearch.errors import KvsearchError
from kvsearch.workloads.files import Record
from kvsearch.workloads.items import Prompts
from kvsearch.workloads.tasks.base import SHARES, Split

SPLITS: tuple[Split, ...] = tuple(SHARES)


@dataclass(frozen=True, eq=False)
class Part(Prompts):
    """Items of one or several workloads, in turn.

    Attributes:
        of: the workload of each item.
        scales: share of the context per nat of each item's loss, times its weight.
        weights: of each item: the mean over items is then the weighted mean over workloads.
    """

    of: tuple[str, ...] = ()
    scales: tuple[float, ...] = ()
    weights: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.items)

    @property
    def longest_ids(self) -> NDArray[np.int64]:
        """Tokens of the longest context with its first question and answer."""
        item = max(self.items, key=lambda item: item.longest)
        ask = item.asks[0]
        return np.concatenate([item.context, ask.question, ask.answer])

    def cut(self, first: int, count: int) -> "Part":
        """So many items from one on."""
        some = slice(first, first + count)
        return Part(
            self.name, self.items[some], self.see, self.of[some], self.scales[some],
            self.weights[some],
        )  # fmt: skip


Rows = NDArray[np.int64] | Part  # windows `[W, T]` of a text, or prompts


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
    last = SHARES["report"][0] if report else 1.0
    found = {
        split: ordered[round(low / last * len(ordered)) : round(high / last * len(ordered))]
        for split, (low, high) in SHARES.items()
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
