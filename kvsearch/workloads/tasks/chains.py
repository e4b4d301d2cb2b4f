"""Chains: sums of numbers that a context gives one by one, worked out in the answer.

Bits damage these more than eviction does: every step needs the digits of the one before.
"""

from collections.abc import Iterator

from kvsearch.workloads.items import Item
from kvsearch.workloads.tasks.base import Material, Task


def make(given: Material, steps: int = 4) -> Iterator[Item]:
    """A worked example after prose, then a chain of so many additions, of which the sums count."""
    number = 0
    while True:
        rng = given.rng(number)
        numbers = [rng.randrange(11, 60) for _ in range(steps + 1)]
        sample = _worked([rng.randrange(11, 60) for _ in range(steps + 1)])
        told = f"The parcels weigh {', '.join(map(str, numbers))} grams, in this order.\n"
        said = given.inside(f"\n{told}")
        shown = given.encode(f"\nAn example of adding step by step: {sample}\n")
        room = given.tokens - len(said) - len(shown) - len(given.start)
        prose = given.passage(rng, room)
        cut = rng.randrange(room // 20, room * 9 // 10)
        context = [*shown, *prose[:cut], *said, *prose[cut:]]
        question = "\nQuestion: add the weights of the parcels step by step. Answer:"
        yield Item(
            f"chains-{number}", f"chains-{number}", given.context(context),
            (given.ask(question, f" {_worked(numbers)}"),),
        )  # fmt: skip
        number += 1


def _worked(numbers: list[int]) -> str:
    total, steps = numbers[0], []
    for n in numbers[1:]:
        steps.append(f"{total} + {n} = {total + n}")
        total += n
    return "; ".join(steps)


TASK = Task("a sum worked out step by step, of numbers hidden in prose", make, {"steps": 4})
