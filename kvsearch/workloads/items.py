"""What a model is asked: contexts, questions about them, and answers whose tokens are scored."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
See = Literal["agnostic", "aware"]
SEES: tuple[See, ...] = ("agnostic", "aware")


@dataclass(frozen=True)
class About:
    """Fields of a record, as they were given.

    Attributes:
        task: its `task`, or empty.
        question, prefix: texts.
        answers: all references.
        tokens: `max_new_tokens`, or None.
    """

    task: str
    question: str
    prefix: str
    answers: tuple[str, ...]
    tokens: int | None


@dataclass(frozen=True, eq=False)
class Ask:
    """A question and its answer.

    Attributes:
        question: token ids between what comes before and the answer; may be empty.
        answer: token ids that are scored, at least one.
        follows: whether it continues the conversation of the ask before it, as a turn of a chat
            does; otherwise it follows on the context alone.
        about: what the record says that it was made of, if it was one.
    """

    question: Ids
    answer: Ids
    follows: bool = False
    about: About | None = None


@dataclass(frozen=True, eq=False)
class Item:
    """A context and what is asked about it; or a window of a text, whose own tokens are scored.

    Attributes:
        name: unique in its workload.
        group: what statistics count as independent: the document.
        context: token ids, with the token that begins a text, if the model has one.
        asks: one or several; of a window, none.
        depth: where in the context the fact is that is asked for, from 0 to 1, if it is one.
        prose: which tokens of the context are of the text, and not of facts that are hidden in it
            `[T]`; None: all. Of a window these are scored.
    """

    name: str
    group: str
    context: Ids
    asks: tuple[Ask, ...]
    depth: float | None = None
    prose: NDArray[np.bool_] | None = None

    def paths(self, see: See) -> Iterator[tuple[int, int]]:
        """Tokens of the prompt, and of all up to the answer's last, for every ask."""
        prompt = length = self.context.size
        for ask in self.asks:
            if not ask.follows:
                prompt = length = self.context.size
                prompt += ask.question.size if see == "aware" else 0
            length += ask.question.size + ask.answer.size
            yield prompt, length

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence: the context, and an ask with those that it follows."""
        return max((length for _, length in self.paths("agnostic")), default=self.context.size)

    def taken_in(self, see: See, *, again: bool = False) -> int:
        """Tokens that go through the model for all asks, prompts twice if they are read `again`."""
        asked = sum(a.question.size + a.answer.size for a in self.asks)
        alone = [a for a in self.asks if not a.follows] if see == "aware" else []
        prompts = max(1, len(alone)) * self.context.size
        twice = prompts + sum(a.question.size for a in alone) if again else 0
        return prompts + asked + twice


@dataclass(frozen=True, eq=False)
class Prompts:
    """Items of one task or file, and how they are asked.

    Attributes:
        name: of the task with its options, or of the file.
        items: in a fixed order; what is measured on few of them uses the first.
        see: `agnostic`: a question arrives after the context was compressed; `aware`: context and
            question are one prompt.
    """

    name: str
    items: tuple[Item, ...]
    see: See = "agnostic"

    @property
    def asks(self) -> int:
        """Questions in all."""
        return sum(len(item.asks) for item in self.items)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(item.longest for item in self.items)

    @property
    def prompt(self) -> int:
        """Tokens of a prompt after which as many follow, up to `longest`, as after any prompt.

        A policy that compacts after a prompt holds its slots, and then what follows: sized for
        these two numbers, it stays within its budget in every item. A window is no prompt:
        beside some, policies have to compact as they go, and there is none.
        """
        if not all(item.asks for item in self.items):
            return 0
        paths = [path for item in self.items for path in item.paths(self.see)]
        return self.longest - max(length - prompt for prompt, length in paths)

    @property
    def digest(self) -> str:
        """SHA-256 of all tokens and of how they are asked."""
        found = hashlib.sha256(self.see.encode())
        for item in self.items:
            for part in (item.context, *(x for a in item.asks for x in (a.question, a.answer))):
                found.update(len(part).to_bytes(4, "little") + part.astype("<i4").tobytes())
        return found.hexdigest()


def ids(tokens: Iterable[int]) -> Ids:
    """Token ids as an array."""
    return np.fromiter(tokens, dtype=np.int64)


def without_context(item: Item, start: Sequence[int]) -> Item:
    """The item with nothing but what begins a text as its context: what can be guessed."""
    context = ids(start) if start else item.context[:1]
    return Item(item.name, item.group, context, item.asks)
