"""From records of text to items of tokens; answers that are missing are the full cache's own."""

from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256
from typing import Any

import numpy as np

from kvsearch.errors import TextError
from kvsearch.models.disk_cache import remembered
from kvsearch.models.load import LoadedModel, max_context
from kvsearch.text import borders
from kvsearch.text.borders import begun, encoder, following
from kvsearch.workloads.files import Record, Turn
from kvsearch.workloads.items import Ask, Ids, Item, Prompts, See, ids

NEW_TOKENS = 32  # of an answer that the full cache gives

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
    made = []
    for record in records:
        item = (_chat if record.messages else _asked)(loaded, record, see, greedy)
        _reach(loaded, record, item.longest, " with the answer")
        made.append(item)
    return Prompts(name, tuple(made), see)


def greedy_of(loaded: LoadedModel, tokens: int = NEW_TOKENS) -> Greedy:
    """Greedy answers of so many tokens by the full cache, kept on disk by model and prompt."""

    def answer(given: Ids, most: int = tokens) -> Ids:
        words = f"answer/{loaded.digest}/{loaded.dtype}/{most}"

        def make() -> list[int]:
            import torch

            with torch.inference_mode():
                x = torch.from_numpy(given)[None].to(loaded.device)
                out = loaded.model.generate(
                    x, attention_mask=torch.ones_like(x), max_new_tokens=most, do_sample=False,
                    pad_token_id=0,
                )  # fmt: skip
            return [int(t) for t in out[0, given.size :].tolist()]

        def read(data: Any) -> Ids:
            if not isinstance(data, list) or not data:
                raise ValueError("no answer")
            return ids(int(t) for t in data)

        return remembered("answers", words, given.astype("<i4").tobytes(), read, make)

    return answer


def _reach(loaded: LoadedModel, record: Record, tokens: int, of: str = "") -> None:
    most = max_context(loaded.model.config)
    if most is not None and tokens > most:
        raise TextError(
            f"{record.where}: {tokens} tokens{of}, and the model's positions reach {most}; shorten "
            "the prompt, or leave this record out"
        )


def _asked(loaded: LoadedModel, record: Record, see: See, greedy: Greedy) -> Item:
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
    return Item(name, name, context, asks)


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


def _chat(loaded: LoadedModel, record: Record, see: See, greedy: Greedy) -> Item:
    """A chat as turns: each answer of the assistant, after all that was said before it."""
    messages = list(record.messages)
    ends = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i > 0]
    context: Ids | None = None
    asks, said = list[Ask](), ids([])
    for i in ends or [len(messages)]:
        before = _templated(loaded, messages[:i], record, prompt=True)
        if context is None:
            context, question = before, ids([])
        else:
            question = _rest(before, said, record)
        if i == len(messages):
            _reach(loaded, record, before.size + 1)
            answer = greedy(before)
        else:
            said = _templated(loaded, messages[: i + 1], record, prompt=False)
            answer = _rest(said, before, record)
        asks.append(Ask(question, answer, follows=bool(asks)))
    assert context is not None
    name = sha256(str(messages).encode()).hexdigest()[:12]
    return Item(name, name, context, tuple(asks))


def _rest(whole: Ids, begin: Ids, record: Record) -> Ids:
    if whole.size <= begin.size or (whole[: begin.size] != begin).any():
        raise TextError(
            f"{record.where}: the model's chat template changes earlier turns when one is added, "
            "so turns cannot follow each other in a cache; give `prompt` and `answer` instead"
        )
    return whole[begin.size :]


def _templated(
    loaded: LoadedModel, messages: list[dict[str, str]], record: Record, *, prompt: bool
) -> Ids:
    if not getattr(loaded.tokenizer, "chat_template", None):
        raise TextError(
            f"{record.where}: field messages: the tokenizer of {loaded.name} has no chat template; "
            "give `prompt` and `answer` instead"
        )
    try:
        text = loaded.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=prompt
        )
    except Exception as e:  # templates raise what they like
        raise TextError(
            f"{record.where}: field messages: the chat template refuses them "
            f"({' '.join(str(e).split())[:150]})"
        ) from e
    return ids(encoded(loaded, text))


def encoded(loaded: LoadedModel, text: str) -> list[int]:
    """A text that begins as the model's token ids, without special tokens around them."""
    return encoder(loaded.tokenizer)(text)


def start_of(loaded: LoadedModel) -> tuple[int, ...]:
    """The tokens with which the model's tokenizer begins a text."""
    return borders.start_of(loaded.tokenizer)

