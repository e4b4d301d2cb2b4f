"""Needles: facts in prose, one of them asked (RULER's niah, arXiv:2404.06654, in one sentence)."""

from collections.abc import Iterator

import numpy as np

from kvsearch.workloads.items import Item
from kvsearch.workloads.tasks.base import Material, Task

THINGS = (
    "otter lantern violet copper meadow falcon granite cedar marble thunder willow amber canyon "
    "saffron glacier orchid beacon walnut prairie cobalt raven juniper velvet harvest"
).split()
PLACES = (
    "museum station library garden market castle school theatre bakery airport workshop hospital"
).split()


def make(given: Material, facts: int = 1, asks: int = 1) -> Iterator[Item]:
    """Contexts with so many facts, a number of seven digits each; their depths are drawn.

    Args:
        given: the material.
        facts: in a context.
        asks: facts that are asked for, each after the context alone.
    """
    number = 0
    while True:
        rng = given.rng(number)
        names = rng.sample([f"{a} {b}" for a in THINGS for b in PLACES], facts)
        known = [(name, f" {rng.randrange(10**6, 10**7)}") for name in names]
        said = [given.inside(f"\nThe special number of the {n} is{x}.\n") for n, x in known]
        room = given.tokens - sum(map(len, said)) - len(given.start)
        prose, context, at = given.passage(rng, room, number), list[int](), 0
        cuts = sorted(rng.sample(range(room // 20, room * 9 // 10), facts))
        places = list[int]()
        for fact, cut in zip(said, cuts, strict=True):
            places.append(len(context) + cut - at)
            context += [*prose[at:cut], *fact]
            at = cut
        context += prose[at:]
        first = rng.randrange(facts)
        asked = [first, *(i for i in range(facts) if i != first)][:asks]
        questions = (
            given.ask(
                f"\nQuestion: what is the special number of the {name}? "
                f"Answer: The special number of the {name} is",
                answer,
            )
            for name, answer in (known[i] for i in asked)
        )
        tokens = given.context(context)
        own = np.ones(tokens.size, np.bool_)
        for fact, place in zip(said, places, strict=True):
            begin = tokens.size - len(context) + place
            own[begin : begin + len(fact)] = False
        yield Item(
            f"needle-{number}", f"needle-{number}", tokens, tuple(questions),
            places[first] / len(context) if asks == 1 else None,
            own,
        )  # fmt: skip
        number += 1


TASK = Task(
    "facts hidden in prose, one asked; needle:4 hides four, needle:4,asks=4 asks for all",
    make,
    {"facts": 1, "asks": 1},
)
