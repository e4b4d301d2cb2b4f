"""From records of text to items of tokens."""

from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256

import numpy as np

from kvsearch.errors import TextError
from kvsearch.models.load import LoadedModel, max_context
from kvsearch.workloads.items import Ask, Ids, Item, Prompts, See, ids
from kvsearch.workloads.prompts.chats import pieces
from kvsearch.workloads.prompts.files import Record, Turn
from kvsearch.workloads.text import borders
from kvsearch.workloads.text.borders import begun, encoder, following

Greedy = Callable[..., Ids]  # tokens of a sequence, and how many at most -> the answer


def items_of(
    loaded: LoadedModel, name: str, records: Sequence[Record], see: See, greedy: Greedy
) -> Prompts:
    """Items of the records of one file.

    Args:
        loaded: the model.
        name: of the file.
        records: in their order.
        see: whether the question is seen before the context is compressed.
        greedy: answers of the full cache, for records without one.

    Raises:
        TextError: a record is longer than the model's positions, an answer has no tokens, or the
            tokenizer has no usable chat template.
    """
    made = list[Item]()
    for record in records:
        for item in (_chat if record.messages else _asked)(loaded, record, see, greedy):
            _reach(loaded, record, item.longest, " with the answer")
            made.append(item)
    return Prompts(name, tuple(made), see)


def _reach(loaded: LoadedModel, record: Record, tokens: int, of: str = "") -> None:
    most = max_context(loaded.model.config)
    if most is not None and tokens > most:
        raise TextError(
            f"{record.where}: {tokens} tokens{of}, and the model's positions reach {most}; shorten "
            "the prompt, or leave this record out"
        )


def _asked(loaded: LoadedModel, record: Record, see: See, greedy: Greedy) -> list[Item]:
    encode, start = encoder(loaded.tokenizer), start_of(loaded)
    alone, questions = begun(start, encode(record.context)), None
    if see == "aware":  # one prompt as it is tokenised; where it is cut makes no difference
        wholes = [begun(start, encode(record.context + turn.question)) for turn in record.turns]
        same = max(1, min(map(partial(_alike, alone), wholes)))
        if all(whole[:same] == wholes[0][:same] for whole in wholes):
            alone, questions = wholes[0][:same], [whole[same:] for whole in wholes]
    if questions is None:
        questions = [following(encode, record.context, turn.question) for turn in record.turns]
    context = ids(alone)
    asks = tuple(
        _ask(loaded, context, ids(question), turn, record, greedy)
        for question, turn in zip(questions, record.turns, strict=True)
    )
    name = sha256(record.group.encode()).hexdigest()[:12]
    return [Item(name, name, context, asks)]


def _alike(a: Sequence[int], b: Sequence[int]) -> int:
    """With how many equal tokens both begin."""
    most = min(len(a), len(b))
    return next((i for i in range(most) if a[i] != b[i]), most)


def _ask(
    loaded: LoadedModel, context: Ids, question: Ids, turn: Turn, record: Record, greedy: Greedy
) -> Ask:
    if turn.answer is None:
        more = () if turn.tokens is None else (turn.tokens,)
        prompt = np.concatenate([context, question])
        _reach(loaded, record, prompt.size + 1)
        return Ask(question, greedy(prompt, *more), about=turn.about)
    before = record.context + turn.question
    answer = ids(following(encoder(loaded.tokenizer), before, turn.gap + turn.answer))
    if not answer.size:
        raise TextError(f"{record.where}: field answer: the tokenizer finds nothing in it")
    return Ask(question, answer, about=turn.about)


def _chat(loaded: LoadedModel, record: Record, see: See, greedy: Greedy) -> list[Item]:
    """A chat as turns: each answer of the assistant, after all that was said before it."""
    group = sha256(str(list(record.messages)).encode()).hexdigest()[:12]
    items = list[Item]()
    for turns in pieces(loaded, record):
        asks = list[Ask]()
        for prompt, said in turns:
            if said is None:
                _reach(loaded, record, prompt.size + 1)
                said = greedy(prompt, *(() if record.tokens is None else (record.tokens,)))
            asks.append(Ask(prompt if asks else ids([]), said, follows=bool(asks)))
        name = f"{group}-{len(items)}" if items else group
        items.append(Item(name, group, turns[0][0], tuple(asks)))
    return items


def encoded(loaded: LoadedModel, text: str) -> list[int]:
    """A text that begins as the model's token ids, without special tokens around them."""
    return encoder(loaded.tokenizer)(text)


def start_of(loaded: LoadedModel) -> tuple[int, ...]:
    """The tokens with which the model's tokenizer begins a text."""
    return borders.start_of(loaded.tokenizer)
