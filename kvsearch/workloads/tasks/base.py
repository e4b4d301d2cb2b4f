"""What a task is: a table line that says what it needs, and a function that makes an item."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvsearch.workloads.items import Ask, Ids, Item, ids
from kvsearch.workloads.text.borders import begun, following, inside
from kvsearch.workloads.text.windows import Split, shares


@dataclass(frozen=True, eq=False)
class Material:
    """What items are made of.

    Attributes:
        encode: text that begins -> token ids without special tokens.
        start: tokens that begin a text.
        prose: token ids of the text in which facts are hidden, of one split only.
        tokens: of a context, about; never more.
        split: which items: those of two splits share no document, passage or fact.
        seed: of what is drawn.
        greedy: the full cache's own answer to tokens, for tasks that have none.
        passages: token ids of the prose of each item, by its number, instead of any of `prose`.
    """

    encode: Callable[[str], list[int]]
    start: tuple[int, ...]
    prose: Ids
    tokens: int
    split: Split
    seed: int = 0
    greedy: Callable[[Ids], Ids] | None = None
    passages: Sequence[Ids] = ()

    def rng(self, number: int) -> random.Random:
        """Random numbers for one item: those of another item or split differ."""
        return random.Random(f"{self.seed}/{self.split}/{number}")

    def part(self, documents: Sequence[Any]) -> Sequence[Any]:
        """The documents of the split."""
        low, high = (round(share * len(documents)) for share in shares()[self.split])
        return documents[low:high]

    def passage(self, rng: random.Random, tokens: int, number: int = 0) -> list[int]:
        """So many tokens of prose in a row, for one item; the text begins anew where it ends."""
        if self.passages:
            return self.passages[number][:tokens].tolist()
        begin = rng.randrange(self.prose.size)
        return np.take(self.prose, range(begin, begin + tokens), mode="wrap").tolist()

    def context(self, tokens: Sequence[int]) -> Ids:
        """A context that begins as texts do."""
        return ids(begun(self.start, tokens))

    def inside(self, text: str) -> list[int]:
        """Token ids of a text that goes on after another."""
        return inside(self.encode, text)

    def ask(self, question: str, answer: str) -> Ask:
        """A question after a context, and its answer, as token ids."""
        return Ask(ids(self.inside(question)), ids(following(self.encode, question, answer)))

    def room(self, text: Callable[[int], str], least: int, most: int = 1 << 20) -> int:
        """How many parts of a text a context has room for.

        Args:
            text: of so many parts; more of them are longer.
            least, most: parts.

        Raises:
            ValueError: there is no room for the least.
        """

        def size(parts: int) -> int:
            return self.context(self.encode(text(parts))).size

        if (shortest := size(least)) > self.tokens:
            raise ValueError(f"it takes {shortest} tokens at least")
        found, step, growing = least, 1 << (self.tokens // 16).bit_length(), True
        while step and found < most:
            tried = min(found + step, most)
            fits = size(tried) <= self.tokens
            found, growing = tried if fits else found, growing and fits
            step = step * 2 if growing else step // 2
        return found


Make = Callable[..., Iterator[Item]]  # (material, its own options as keywords) -> items


@dataclass(frozen=True)
class Task:
    """One line of the table of tasks.

    Attributes:
        about: what is asked, in a line.
        make: yields items without end, or until the documents are used up.
        options: names of its own options, with their defaults; the first may be given as `name:4`.
        package: the module that has its data, or None.
        wheel: the package to install for it.
        extra: of kvsearch, which brings that package; None if none does.
        tokens: of a context, by default.
    """

    about: str
    make: Make
    options: dict[str, int] = field(default_factory=dict)
    package: str | None = None
    wheel: str | None = None
    extra: str | None = "tasks"
    tokens: int = 1000
