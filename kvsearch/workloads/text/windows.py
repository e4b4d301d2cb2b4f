"""Tokens of a text, its disjoint search, select and report parts, and windows of a part."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvsearch.errors import TextError
from kvsearch.workloads.text.borders import encoder, start_of, unbegun
from kvsearch.workloads.text.source import Source

Split = Literal["search", "select", "report"]
SPLITS: tuple[Split, ...] = ("search", "select", "report")


def shares(*, apart: bool = False) -> dict[Split, tuple[float, float]]:
    """Where the splits of a text, or of a list of documents, begin and end, from 0 to 1.

    Args:
        apart: the report has a text or a list of its own; of that it takes all.
    """
    if apart:
        return {"search": (0.0, 0.7), "select": (0.7, 1.0), "report": (0.0, 1.0)}
    return {"search": (0.0, 0.5), "select": (0.5, 0.65), "report": (0.65, 1.0)}


@dataclass(frozen=True, eq=False)
class Tokens:
    """A text, or a contiguous part of one, as token ids.

    Attributes:
        ids: int32 `[N]`, without special tokens.
        name: of the source, with the part: `wikitext2/test/search`.
        text_sha256: of the whole source text.
        token_sha256: of `ids` as little-endian int32.
        start: the tokens that this tokenizer puts before every text. Windows begin with them,
            because a deployed model sees them too, and some models (Gemma) fail without.
    """

    ids: NDArray[np.int32]
    name: str
    text_sha256: str
    token_sha256: str
    start: tuple[int, ...] = ()

    def part(self, begin: int, end: int, name: str) -> "Tokens":
        """Tokens `begin` to `end` (exclusive) under `NAME/name`."""
        ids = self.ids[begin:end]
        return Tokens(ids, f"{self.name}/{name}", self.text_sha256, _sha256(ids), self.start)


@dataclass(frozen=True, eq=False)
class Parts:
    """The texts of the search, of the selection among finalists, and of the printed figures.

    Attributes:
        search, select, report: of the splits.
        whole: the text that they are cut from, but for a report text of its own.

    Raises:
        TextError: two of them are the same text.
    """

    search: Tokens
    select: Tokens
    report: Tokens
    whole: Tokens

    def __post_init__(self) -> None:
        pairs = ((self.search, self.select), (self.search, self.report), (self.select, self.report))
        for a, b in pairs:
            if a.token_sha256 == b.token_sha256:
                raise TextError(
                    f"{a.name} and {b.name} are the same text, so a figure would be from text "
                    "that the search saw; give different ones"
                )


def tokenize(tokenizer: Any, source: Source) -> Tokens:
    """Tokenise a text in one go, so that the ids do not depend on how it was chunked.

    Args:
        tokenizer: a transformers tokenizer.
        source: about 1 s per MB on one core.

    Raises:
        TextError: the tokenizer finds nothing in it.
    """
    start = start_of(tokenizer)
    ids = np.asarray(unbegun(start, encoder(tokenizer)(source.text)), dtype=np.int32)
    if not ids.size:
        raise TextError(f"{source.name} has no tokens; give another text with --text FILE")
    ids.setflags(write=False)
    return Tokens(ids, source.name, source.sha256, _sha256(ids), start)


def split(tokens: Tokens, report: Tokens | None = None) -> Parts:
    """Cut a text into search, select and report parts: contiguous, disjoint, in this order.

    Args:
        tokens: the text.
        report: another one that the report takes.

    Raises:
        TextError: a part would be empty, or both texts are the same.
    """
    sizes: dict[str, float] = {k: b - a for k, (a, b) in shares(apart=report is not None).items()}
    if report is not None:
        del sizes["report"]
    search, select, *rest = cut(tokens, sizes)
    return Parts(search, select, rest[0] if report is None else report, tokens)


def cut(tokens: Tokens, shares: Mapping[str, float]) -> tuple[Tokens, ...]:
    """Cut a text into named contiguous parts that cover it, in proportion to `shares`.

    Raises:
        TextError: a part would be empty.
    """
    edges = np.cumsum([0.0, *shares.values()])
    places = [round(float(e / edges[-1]) * tokens.ids.size) for e in edges]
    parts = []
    for name, (begin, end) in zip(shares, pairwise(places), strict=True):
        if end <= begin:
            raise TextError(
                f"{tokens.name} has only {tokens.ids.size:,} tokens, too few for a {name} part; "
                "give a longer text"
            )
        parts.append(tokens.part(begin, end, name))
    return tuple(parts)


def windows(tokens: Tokens, *, count: int, length: int, seed: int = 0) -> NDArray[np.int64]:
    """Windows of a part that do not overlap and are spread evenly over it.

    The part is divided into `count` equal stretches and each gives one window, at a place in it
    that `seed` decides. Rows are in an order in which any first few are spread over the part
    too, so that a policy may begin with some of them.

    Args:
        tokens: the part.
        count: windows.
        length: tokens of a window, with those that begin a text.
        seed: decides where in its stretch a window begins.

    Returns:
        int64 `[count, length]`.

    Raises:
        TextError: the part is too short.
    """
    lead = np.array(tokens.start, dtype=np.int64)
    least = max(2, lead.size + 1)
    if count < 1 or length < least:
        raise TextError(f"{count} windows of {length} tokens: give at least 1 of at least {least}")
    span, size = length - lead.size, tokens.ids.size
    if size // count < span:
        fits = ["give a longer text"]
        if size >= span:
            fits.append(f"--windows {size // span}")
        if size // count + lead.size >= least:
            fits.append(f"--context {size // count + lead.size}")
        raise TextError(
            f"{tokens.name} has {size:,} tokens and {count} windows of {length:,} need "
            f"{count * span:,}; {' or '.join(fits)}"
        )
    begins = _begins(size, count, span, seed)
    rows = [np.concatenate([lead, tokens.ids[b : b + span]]) for b in begins]
    return np.stack([rows[i] for i in _spread(count)])


def beside(tokens: Tokens, *, count: int, length: int, seed: int = 0) -> Tokens:
    """The longest stretch that `windows` with the same arguments leaves out; it may be empty."""
    span, size = length - len(tokens.start), tokens.ids.size
    begins = _begins(size, count, span, seed)
    gaps = zip([0, *(b + span for b in begins)], [*begins, size], strict=True)
    begin, end = max(gaps, key=lambda gap: gap[1] - gap[0])
    return tokens.part(begin, end, "beside")


def _begins(size: int, count: int, span: int, seed: int) -> list[int]:
    """Where windows of `span` tokens begin in a part of `size`, in order."""
    rng = np.random.default_rng(seed)
    edges = [i * size // count for i in range(count + 1)]
    return [int(rng.integers(a, b - span + 1)) for a, b in pairwise(edges)]


def _spread(count: int) -> Sequence[int]:
    """`0 .. count - 1` by reversed bits: 0 4 2 6 1 5 3 7."""
    bits = max(count - 1, 1).bit_length()
    return sorted(range(count), key=lambda i: f"{i:0{bits}b}"[::-1])


def _sha256(ids: NDArray[np.int32]) -> str:
    return hashlib.sha256(ids.astype("<i4").tobytes()).hexdigest()
