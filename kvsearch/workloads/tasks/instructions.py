"""Instructions: a system prompt, a long document, then a question; is every instruction followed?

Eviction may drop an instruction as a whole (arXiv:2510.00231), which a mean over the tokens of an
answer hides. So each part of the answer that an instruction is about is an ask of its own, after
the parts before it: exact answers are the share of instructions that are followed. Two examples
show what is meant: small models do not follow instructions without.
"""

from collections.abc import Iterator

from kvsearch.errors import KvsearchError
from kvsearch.workloads.items import Ask, Item
from kvsearch.workloads.tasks.base import Material, Task
from kvsearch.workloads.tasks.needle import PLACES, THINGS

NAMES = "Anna Boris Clara David Emma Frank Greta Henry Irene Jacob Laura Martin Nora Oscar".split()
UNITS = "grams metres pounds litres seconds dollars miles degrees points pages".split()
SIGNS = "# * @ % & + = ~".split()
RULES = {  # what is said, the words to choose from, and what is written
    "begin": ("Begin the answer with the word {}.", THINGS[:8], " {}"),
    "address": ("Address the reader as {}.", NAMES, " {},"),
    "sign": ("Write the sign {} before the number.", SIGNS, " {}"),
    "unit": ("Write the unit {} after the number.", UNITS, " {}"),
    "end": ("End the answer with the word {}.", THINGS[8:16], " {}"),
}
ORDER = ("begin", "address", "sign", "number", "unit", "end")  # of the parts of an answer


def make(given: Material, rules: int = 3) -> Iterator[Item]:
    """Contexts with so many instructions at the beginning, and a number in the prose after them."""
    if rules > len(RULES):
        raise KvsearchError(f"task instructions has {len(RULES)} rules, and {rules} were asked for")
    number = 0
    while True:
        yield _item(given, number, rules)
        number += 1


def _item(given: Material, number: int, rules: int) -> Item:
    rng = given.rng(number)
    drawn = rng.sample(sorted(RULES), rules)
    words = {name: rng.choice(RULES[name][1]) for name in RULES if name in drawn}
    thing = f"{rng.choice(THINGS[16:])} {rng.choice(PLACES)}"
    value = f" {rng.randrange(1000, 10000)}"
    told = (RULES[name][0].format(word) for name, word in words.items())
    listed = "\n".join(f"{i}. {line}" for i, line in enumerate(told, 1))
    said = {name: RULES[name][2].format(word) for name, word in words.items()}

    def parts(value: str) -> list[str]:
        return [said.get(name, value) for name in ORDER if name == "number" or name in said]

    shown = (f"{_asked(x)}{''.join(parts(v))}\n" for x, v in (("door", " 1234"), ("roof", " 5678")))
    system = given.encode(
        f"Every answer follows all of these instructions:\n{listed}\n{''.join(shown)}\n"
    )
    fact = given.inside(f"\nThe number of the {thing} is{value}.\n")
    room = given.tokens - len(system) - len(fact) - len(given.start)
    prose = given.passage(rng, room)
    cut = rng.randrange(room // 20, room * 9 // 10)
    context = given.context([*system, *prose[:cut], *fact, *prose[cut:]])
    before, asks = _asked(thing), list[Ask]()
    for part in parts(value):
        asks.append(given.ask(before, part))
        before += part
    name = f"instructions-{number}"
    return Item(name, name, context, tuple(asks))


def _asked(thing: str) -> str:
    return f"\nQuestion: what is the number of the {thing}?\nAnswer:"


TASK = Task("instructions before a long text, each of them checked in the answer", make,
            {"rules": 3})  # fmt: skip
