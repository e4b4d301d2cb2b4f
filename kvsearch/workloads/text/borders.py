"""Where texts meet: the tokens that begin one, and those of a text that goes on after another.

Tokenizers in SentencePiece's manner (Llama 2, Mistral 7B) put a space before every text that they
are given, and byte-pair encodings join letters across a border: tokens of two texts are not those
of their tokens one after the other.
"""

from collections.abc import Callable, Sequence
from typing import Any

Encode = Callable[[str], list[int]]  # of a text that begins; without special tokens around it

# What a text may go on after: none of them joins every text, and the first ones join fewest.
_AFTER_WORDS, _AFTER_ENDS = ("a", "0", ")", "."), ("\n", ")", ".", "0", "a")


def encoder(tokenizer: Any) -> Encode:
    """Text -> token ids by a transformers tokenizer, without special tokens around them."""

    def encode(text: str) -> list[int]:
        found = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return [int(i) for i in found]

    return encode


def start_of(tokenizer: Any) -> tuple[int, ...]:
    """The tokens that this tokenizer puts before every text: none, one, or GLM's `[gMASK]<sop>`."""
    plain, whole = encoder(tokenizer)("a"), [int(i) for i in tokenizer("a")["input_ids"]]
    places = range(len(whole) - len(plain) + 1)
    at = next((i for i in places if whole[i : i + len(plain)] == plain), 0)
    return tuple(whole[:at])


def begun(start: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """Tokens with those that begin a text before them, as far as they are not there already."""
    return [*start[: len(start) - _there(start, tokens)], *tokens]


def unbegun(start: Sequence[int], tokens: Sequence[int]) -> Sequence[int]:
    """Tokens without those that begin a text, where they are there."""
    return tokens[_there(start, tokens) :]


def _there(start: Sequence[int], tokens: Sequence[int]) -> int:
    """How many of the last tokens of `start` the tokens begin with."""
    most = range(min(len(start), len(tokens)), 0, -1)
    return next((n for n in most if list(tokens[:n]) == list(start[-n:])), 0)


def following(encode: Encode, before: str, text: str) -> list[int]:
    """Tokens of a text after another: the rest of the whole text's, after those of `before`.

    Where a token of the whole reaches across the border, there is no such rest: then they are those
    of the text inside another one.
    """
    first = encode(before)
    whole = encode(before + text)
    return whole[len(first) :] if whole[: len(first)] == first else inside(encode, text)


def inside(encode: Encode, text: str) -> list[int]:
    """Tokens of a text that begins inside another one, as they are where none joins the border."""
    for before in _AFTER_WORDS if text[:1].isspace() else _AFTER_ENDS:
        first = encode(before)
        whole = encode(before + text)
        if whole[: len(first)] == first:
            return whole[len(first) :]
    return encode(text)
