"""Recall: lines of keys and values, some of the keys asked."""

from collections.abc import Iterator

from kvsearch.workloads.items import Item
from kvsearch.workloads.tasks.base import Material, Task
from kvsearch.workloads.tasks.needle import PLACES, THINGS


def make(given: Material, asks: int = 4) -> Iterator[Item]:
    """As many lines as the context has room for; so many of them are asked."""
    number = 0
    every = [f"{a} {b}" for a in THINGS for b in PLACES]
    while True:
        rng, lines, context = given.rng(number), dict[str, str](), list[int]()
        context += given.encode("A list of rooms and their codes.\n")
        for name in rng.sample(every, len(every)):
            code = str(rng.randrange(1000, 10000))
            line = given.inside(f"{name}: {code}\n")
            if len(context) + len(line) + max(1, len(given.start)) > given.tokens:
                break
            lines[name] = code
            context += line
        chosen = rng.sample(sorted(lines), min(asks, len(lines)))
        yield Item(
            f"recall-{number}", f"recall-{number}", given.context(context),
            tuple(
                given.ask(f"Question: which code has the {x}? Answer: {x}:", f" {lines[x]}")
                for x in chosen
            ),
        )  # fmt: skip
        number += 1


TASK = Task("lines of keys and values, some keys asked", make, {"asks": 4}, tokens=600)
