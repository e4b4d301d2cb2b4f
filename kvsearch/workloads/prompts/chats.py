"""Chats by the model's template: prompts and answers as turns of a cache.

A template is text that is put around messages, and more: it may open a block of thoughts at the end
of a prompt (DeepSeek-R1), put an empty one before an answer without thoughts, and leave out those
of earlier turns (Qwen3). An answer is what follows on everything that the template puts before it;
a turn that goes on from another text than the cache has begins a prompt of its own.
"""

from typing import Any

from kvsearch.errors import TextError
from kvsearch.models.load import LoadedModel
from kvsearch.workloads.items import Ids, ids
from kvsearch.workloads.prompts.files import Record
from kvsearch.workloads.prompts.messages import SHOWN, Message
from kvsearch.workloads.text.borders import encoder, following

MARK = "ANSWER-7f3a"  # stands for an answer, to see what a template puts before one
INSTEAD = "give `prompt` and `answer` instead"


class Chat:
    """A chat as its template writes it.

    Args:
        loaded: the model, for its tokenizer.
        record: with messages.

    Raises:
        TextError: there is no template, or it refuses the messages or leaves some of them out.
    """

    def __init__(self, loaded: LoadedModel, record: Record) -> None:
        self._tokenizer, self._record = loaded.tokenizer, record
        self._messages = [*record.messages]
        if not getattr(loaded.tokenizer, "chat_template", None):
            raise self._error(f"the tokenizer of {loaded.name} has no chat template; {INSTEAD}")
        self._require_shown()

    def turns(self) -> list[tuple[str, str | None]]:
        """The text before each answer of the assistant, and the answer; None is to be generated."""
        ends = [i for i, m in enumerate(self._messages) if m["role"] == "assistant" and i > 0]
        found: list[tuple[str, str | None]] = [self._turn(i) for i in ends]
        if self._messages[-1]["role"] != "assistant":
            found.append((self._text(self._messages, prompt=True), None))
        return found

    def _turn(self, i: int) -> tuple[str, str]:
        before, message = self._messages[:i], self._messages[i]
        prompt = self._text(before, prompt=True)
        said = self._text([*before, message])
        put, found, _ = self._text([*before, {"role": "assistant", "content": MARK}]).partition(
            MARK
        )
        if (
            found
            and said.startswith(put)
            and not (put.startswith(prompt) and not put[len(prompt) :].strip())
        ):  # the template puts words of its own before the answer, or opens less than the prompt
            start = put.rstrip(" ")
            fits = start.startswith(prompt) or prompt.startswith(start)
        else:
            start, fits = prompt, said.startswith(prompt)
        answer = said[len(start) :]
        if not fits and self._opens_alike(before):  # only what was said earlier is another text
            start, fits = prompt, True
        if not fits:
            raise self._error(
                f"the chat template writes message {i + 1} after another text than its prompt "
                f"ends in; {INSTEAD}"
            )
        if "".join(message["content"].split()) not in "".join(answer.split()):
            raise self._error(
                f"the chat template leaves out a part of message {i + 1}, such as its thoughts; "
                f"leave it out, or {INSTEAD}"
            )
        return start, answer

    def _opens_alike(self, messages: list[Message]) -> bool:
        """Whether an answer to the last of these opens as its prompt does.

        The template of Mistral 7B puts a system prompt before the last question only, so that it
        is in the prompt, and gone once the question is answered.
        """
        asked = [*messages[:-1], {**messages[-1], "content": MARK}]
        prompt = self._text(asked, prompt=True).split(MARK)
        answered = self._text([*asked, {"role": "assistant", "content": MARK}]).split(MARK)
        return min(len(prompt) + 1, len(answered)) > 2 and prompt[-1] == answered[-2].rstrip(" ")

    def _require_shown(self) -> None:
        """Fields of messages, and tools, change what the template writes."""
        for i, message in enumerate(self._messages):
            for name in SHOWN:
                if name in message:
                    less = {k: v for k, v in message.items() if k != name}
                    before = self._messages[:i]
                    if self._text([*before, message]) == self._text([*before, less]):
                        raise self._error(
                            f"the chat template leaves out {name} of message {i + 1}; leave it out"
                        )
        if "tools" in self._record.template:
            rest = {k: v for k, v in self._record.template.items() if k != "tools"}
            if self._text(self._messages) == self._text(self._messages, rest):
                raise self._error("the chat template leaves out field tools; leave it out", "tools")

    def _text(
        self, messages: list[Message], arguments: dict[str, Any] | None = None, prompt: bool = False
    ) -> str:
        given = self._record.template if arguments is None else arguments
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=prompt, **given
            )
        except Exception as e:  # templates raise what they like
            raise self._error(
                f"the chat template refuses them ({' '.join(str(e).split())[:150]})"
            ) from e
        return text

    def _error(self, told: str, field: str = "messages") -> TextError:
        return TextError(f"{self._record.where}: field {field}: {told}")


def pieces(loaded: LoadedModel, record: Record) -> list[list[tuple[Ids, Ids | None]]]:
    """Tokens of a chat: prompts and answers of turns that follow each other in one cache, by cache.

    The first prompt of a cache is its context. An answer that is None is to be generated.
    """
    encode = encoder(loaded.tokenizer)
    found, held = list[list[tuple[Ids, Ids | None]]](), ""
    for start, answer in Chat(loaded, record).turns():
        if found and start.startswith(held):
            prompt = following(encode, held, start[len(held) :])
        else:
            found.append([])
            prompt = encode(start)
        said = None if answer is None else ids(following(encode, start, answer))
        found[-1].append((ids(prompt), said))
        held = start + (answer or "")
    return found
