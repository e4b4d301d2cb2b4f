"""Whether what is scored is what a deployed model sees: every run on prompts tries it.

Prompts that are tokenised or cut in another way than a deployed model's give figures that look like
those of a weak model. So a text cut at random, and one that begins as the tokenizer begins it, have
to be that text; an answer of a chat has to be what is said, without the template's words; and the
full cache has to give the answer that the model gives without any cache.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from kvsearch.errors import TextError
from kvsearch.evaluation.answers import answers
from kvsearch.evaluation.evaluator import Evaluator
from kvsearch.models.disk_cache import remembered
from kvsearch.models.load import LoadedModel
from kvsearch.policy import Policy
from kvsearch.session.progress import Shown
from kvsearch.workloads.items import Ask, Ids, Item, Prompts, ids
from kvsearch.workloads.prompts.encode import items_of, start_of
from kvsearch.workloads.prompts.files import Record, Turn

CUTS = 24  # of a text, at random
PROMPT, TOKENS = 96, 8  # tokens of the prompt that is answered, and of the answer
TIE = 0.1  # between the two best logits, which rounding of a cache to 16 bits may turn round
TEXT = (
    'Anna said: "f(x) = 10007", and left.\nQuestion: where to? Answer: K\u00f6ln, '
    '\u6771\u4eac.\n\n{"a": [1, "b"]}\n'
)
SAID = "Under the mat."


def self_check(
    loaded: LoadedModel,
    workloads: Sequence[Prompts],
    records: Mapping[str, Sequence[Record]],
    shown: Shown,
) -> str:
    """Say in a sentence what is wrong, if something is, and return it; else an empty text.

    Args:
        loaded: the model.
        workloads: whose first prompt is answered, once a model: it is kept on disk.
        records: of files of prompts, by name.
        shown: where the sentence goes.
    """
    for name, some in records.items():
        if said := joined(name, some):
            shown.say(said)
    prompt = workloads[0].items[0].context[:PROMPT]

    def measure() -> str:
        return answer_fault(loaded, prompt)

    fault = text_fault(loaded)
    if not fault and any(r.messages for some in records.values() for r in some):
        fault = template_fault(loaded)
    if not fault:
        fault = remembered("self-check", f"1/{loaded.digest}/{loaded.dtype}", b"", str, measure)
    if fault:
        fault = f"self-check of {loaded.name}: {fault}"
        shown.say(fault)
    return fault


def joined(name: str, records: Sequence[Record]) -> str:
    """A sentence, if most answers of a file go on in the last word of what they follow."""
    turns = [(r.context + t.question, t) for r in records for t in r.turns if t.answer]
    found = [
        (before, t.answer)
        for before, t in turns
        if t.answer and (before[-1:] + (t.gap + t.answer)[:1]).isalnum() and before.isascii()
    ]
    if 2 * len(found) <= len(turns):
        return ""
    before, answer = found[0]
    return (
        f"{name}: {len(found)} of {len(turns)} answers go on in the last word of the prompt "
        f"({(before[-12:] + answer[:12])!r}); where a space belongs there, begin the answer with "
        'it, or give "answer_gap": " "'
    )


def text_fault(loaded: LoadedModel) -> str:
    """A sentence, if a text that is cut into context, question and answer is another one."""
    tokenizer, rng = loaded.tokenizer, random.Random(0)
    text = _known(tokenizer, TEXT)
    whole = [int(i) for i in tokenizer(text)["input_ids"]]
    if whole[-1] == tokenizer.eos_token_id:  # what ends a text ends no prompt
        whole.pop()
    start = tokenizer.decode(list(start_of(loaded)))
    begun = tokenizer(start + text, add_special_tokens=False)["input_ids"]
    for i in range(CUTS):
        a, b = sorted(rng.sample(range(1, len(text)), 2))
        begin, deployed = (start, begun) if i % 2 else ("", whole)  # a text may have it already
        turn = Turn(text[a:b], text[b:])
        found = _tokens(loaded, Record(begin + text[:a], (turn,), (), "self-check", "self-check"))
        if tokenizer.decode(found) != tokenizer.decode(deployed):
            return (
                f"the tokenizer does not continue a text: cut before {text[a : a + 8]!r} and "
                f"{text[b : b + 8]!r}, it is not the same, so answers are not scored as the "
                "model would write them"
            )
    return ""


def template_fault(loaded: LoadedModel) -> str:
    """A sentence, if the answer of a short chat is not what is said in it."""
    chat = ({"role": "user", "content": "Where?"}, {"role": "assistant", "content": SAID})
    try:
        ask = _made(loaded, Record("", (), chat, "self-check", "self-check")).asks[0]
    except TextError:  # a template that refuses such a chat says so of the chats that are given
        return ""
    said = loaded.tokenizer.decode(ask.answer).strip()
    if said.startswith(_known(loaded.tokenizer, SAID)):
        return ""
    return f"the chat template puts words of its own before an answer, which are scored: {said!r}"


def answer_fault(loaded: LoadedModel, prompt: Ids) -> str:
    """A sentence, if the full cache does not give what the model says after a prompt."""
    said = list(_without_cache(loaded, prompt))
    if not said:
        return ""
    item = Item("self-check", "self-check", prompt, (Ask(ids([]), ids(said)),))
    asked = Prompts("self-check", (item,))
    if answers(Evaluator(loaded), Policy(name="full"), asked, resident=False).exact.all():
        return ""
    return (
        f"the full cache does not give the answer {loaded.tokenizer.decode(said)!r} that the model "
        "gives without a cache, so exact answers and losses are not those of this model"
    )


def _without_cache(loaded: LoadedModel, prompt: Ids) -> Iterator[int]:
    """First choices after a prompt, up to a tie."""
    given = torch.from_numpy(prompt)[None].to(loaded.device)
    with torch.inference_mode():
        for _ in range(TOKENS):
            logits = loaded.model(given, use_cache=False).logits[0, -1].float()
            best = logits.topk(2)
            if float(best.values[0] - best.values[1]) < TIE:
                return
            yield int(best.indices[0])
            given = torch.cat([given, best.indices[None, :1].to(given.device)], 1)


def _known(tokenizer: Any, text: str) -> str:
    """The text without letters that the tokenizer has no tokens for."""
    unknown = getattr(tokenizer, "unk_token_id", None)
    if unknown is None:
        return text
    return "".join(
        x for x in text if unknown not in tokenizer(x, add_special_tokens=False)["input_ids"]
    )


def _made(loaded: LoadedModel, record: Record) -> Item:
    return items_of(loaded, "self-check", [record], "agnostic", lambda *_: ids([])).items[0]


def _tokens(loaded: LoadedModel, record: Record) -> list[int]:
    item = _made(loaded, record)
    parts = (item.context, *(x for ask in item.asks for x in (ask.question, ask.answer)))
    return [int(i) for i in np.concatenate(parts)]
