"""Anchors: tokens that stand for the sequence they end, whose other tokens are dropped (AnLLM)."""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from kvsearch.frozen import Frozen

NEW = "<AC>"  # AnLLM's name of the inserted token


def _mark(mark: str) -> str:
    if not mark or mark != mark.strip():
        raise ValueError("a mark is not empty and has no blanks around it")
    return mark


Mark = Annotated[str, AfterValidator(_mark)]
Every = Annotated[int, Field(ge=1)]


class Anchors(Frozen):
    """Which tokens are anchors, and what becomes of the sequences that they end (arXiv:2402.07616).

    A sequence is what lies between two anchors, the second one included. A query sees its own
    sequence and earlier anchors; a query that is an anchor sees its own sequence only. Right after
    an anchor's own forward pass the ordinary tokens of its sequence are dropped. Sinks, the recent
    window and the protected tokens stay and are seen by every query.

    Attributes:
        at: `marks`, tokens whose text, without blanks around it, ends in one of `marks`;
            `sentences`, between sentences (with `insert`); a number n, every n tokens; `given`, the
            tokens `ids`, or with `insert` wherever the caller put the new token.
        marks: ends of tokens, such as `.`.
        ids: token ids.
        insert: anchors are new tokens, `<AC>`, that are put into the text (AnLLM-AC), instead of
            tokens that it has (AnLLM-EP).
        embedding: of the new token where the tokenizer has none: a `copy` of that of ".", as in
            AnLLM's code, or the `mean` of all, as in its text.
        close: whether an anchor drops its sequence; otherwise anchors are only evicted last.
        isolate: whether a query that is an anchor is blind to earlier anchors.
        protected: tokens that are kept in full, first and last plus one, or the whole `prompt`;
            none of them is an anchor.
    """

    at: Literal["marks", "sentences", "given"] | Every = "marks"
    marks: tuple[Mark, ...] = Field(default=(".",), min_length=1)
    ids: tuple[Annotated[int, Field(ge=0)], ...] = ()
    insert: bool = False
    embedding: Literal["copy", "mean"] = "copy"
    close: bool = True
    isolate: bool = True
    protected: Literal["prompt"] | tuple[int, int] | None = None

    @model_validator(mode="after")
    def _can_be_found(self) -> Self:
        if self.at == "sentences" and not self.insert:
            raise ValueError("at 'sentences' needs insert: only new tokens are put between them")
        if self.at == "given" and not self.insert and not self.ids:
            raise ValueError("at 'given' needs ids, or insert")
        if isinstance(self.protected, tuple) and not 0 <= self.protected[0] < self.protected[1]:
            raise ValueError(f"protected {list(self.protected)} has no tokens")
        return self

    def check(self, *, ladder: bool, adaptive: bool, grouped: bool, rule: bool, sinks: int) -> None:
        """Raise a `ValueError` where anchors do not go with the rest of the policy.

        Args:
            ladder: whether it has a ladder.
            adaptive: whether heads share their layer's slots anew (AdaKV).
            grouped: whether neighbouring tokens share scales.
            rule: whether it ranks slots by a rule.
            sinks: first tokens that it never evicts.
        """
        if ladder:
            raise ValueError("anchors do not go with a ladder, which thins neighbouring slots")
        if adaptive:
            raise ValueError("anchors do not go with budgets.kind 'adakv'")
        if grouped:
            raise ValueError("anchors do not go with quantizer.along 'tokens': groups would break")
        if rule and not self.close:
            raise ValueError("anchors.close false needs eviction by age: no rule")
        if rule and isinstance(self.protected, tuple) and self.protected[0] > sinks:
            raise ValueError(
                "anchors.protected must begin at 0, or at the end of the sinks, where there is a "
                "rule"
            )

    def canonical(self) -> dict[str, Any]:
        """Fields that matter, for `Policy.canonical`."""
        d = self.model_dump()
        if self.at != "marks":
            del d["marks"]
        if self.at != "given" or self.insert:
            del d["ids"]
        if not self.insert:
            del d["embedding"]
        return d

    def kept(self, sinks: int, prompt: int = 0) -> tuple[range, range]:
        """Tokens that are never dropped: the sinks, and those protected beyond them."""
        if self.protected is None:
            return range(sinks), range(0)
        start, stop = (0, prompt) if self.protected == "prompt" else self.protected
        start = max(start, sinks)
        return range(sinks), range(start, max(start, stop))
