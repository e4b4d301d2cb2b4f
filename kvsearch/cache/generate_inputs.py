"""What `generate` gives a cache: whether a call goes on with the sequence that the cache holds.

`generate` is given whole sequences, and transformers cuts off as many of their first tokens as the
cache has seen, whichever those are. Here what is given is compared with what was given before; for
other caches nothing is done.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel

from kvsearch.errors import ModelError, PolicyError

RESET = "call the cache's reset() before the next prompt, or make a cache for each"
CLOSE = 0.05  # of an embedding's size: more than bf16 rounds; another token misses by 1
_SIGNS = 8  # sums of an embedding's channels that are kept of each token


class Given:
    """Tokens that `generate` gave a cache, as far as they are known.

    Attributes:
        whole: whether the cache needs its prompt in one call.
    """

    def __init__(self, whole: bool = False) -> None:
        self.whole = whole
        self.forget()

    def forget(self) -> None:
        """Know nothing."""
        self._ids: Tensor | None = None  # [B, N]
        self._first = 0  # index in the stream of their first token
        self._marks: Tensor | None = None  # of a prompt that came as embeddings, see `marks`
        self._start = 0  # index in the stream of its first token
        self._pieces = 0  # of a prompt, since `generate` began
        self._begins = False  # whether the call before brought a piece of a prompt
        self._due: int | None = None  # where the ids after a prompt begin, if nothing is added
        self._added = 0  # tokens that the model put before those that it was given

    def select(self, rows: Tensor) -> None:
        """Sequences of the cache are selected, repeated or in another order."""
        if self._ids is not None:
            self._ids = self._ids[rows.to(self._ids.device)]
        if self._marks is not None:
            self._marks = self._marks[rows.to(self._marks.device)]

    @property
    def _known(self) -> int:
        """Tokens from the stream's first on that are known."""
        found = 0
        for x, start in ((self._marks, self._start), (self._ids, self._first)):
            if x is not None and start <= found:
                found = max(found, start + x.shape[1])
        return found

    def begin(self) -> None:
        """`generate` begins."""
        self._pieces = 0

    def take(
        self, ids: Tensor, seen: int, fed: int | None, *, prompt: bool, use_cache: bool,
        embeds: Tensor | None = None, embed: Callable[[Tensor], Tensor] | None = None,
    ) -> None:  # fmt: skip
        """Look at what `generate` prepares for a cache that has seen `seen` tokens.

        Args:
            ids: what it was given `[B, N]`.
            seen: tokens.
            fed: how many of the last ids come next; None is all of them.
            prompt: whether these are the first of this `generate`.
            use_cache: its option.
            embeds: the prompt, where it comes as embeddings `[B, N, E]`; ids may be empty then.
            embed: embeds ids.

        Raises:
            ModelError: the cache would take in tokens twice, or tokens of another sequence.
            PolicyError: a prompt comes in pieces, and the policy needs it in one call.
        """
        if seen and not prompt and fed is None and not use_cache:
            raise ModelError(again(seen, 0, seen + 1))
        given = ids if embeds is None else marks(embeds)
        count = given.shape[1]
        first = seen + (count if fed is None else fed) - count
        if prompt:
            self._pieces += 1
            if self.whole and self._pieces > 1:
                raise PolicyError(
                    "this policy treats the prompt, the first call, in another way than what "
                    "follows: give it in one call (no prefill_chunk_size)"
                )
        if self._due is not None and not prompt:
            self._added += first - self._due
        due = first + count - ids.shape[1]
        self._due = due if prompt and self._pieces == 1 else None
        if prompt and seen and fed is not None and self._added:
            raise ModelError(
                f"the model put {self._added} tokens of its own before the prompt, as in prompt "
                f"tuning, and generate() would cut off as many of the new ones; {RESET}"
            )
        if seen and (prompt or self._begins):
            self._compare(given, first, seen, embed)
            if prompt and fed is not None and count <= seen:
                raise ModelError(again(seen, 0, count))
            if prompt and fed is not None and self._known < seen:
                raise ModelError(
                    f"the cache has seen {seen} tokens, not all of them from generate(), which so "
                    "cannot compare this prompt with them: if it goes on with them, give the new "
                    "tokens alone and an attention_mask for all, or take the first ones in with "
                    f"generate(..., max_new_tokens=1); else {RESET}"
                )
        self._begins = prompt and fed is None and seen > 0
        if fed is None and seen:  # a piece of a prompt
            if embeds is None:
                self._note(ids, first)
            return
        if embeds is not None:
            self._marks, self._start, self._ids = given, first, None
            return
        if prompt and not first:
            self._marks = None
        self._note(ids, first)

    def _note(self, ids: Tensor, first: int) -> None:
        """Know ids from `first` of the stream on, and what is known before them."""
        start, before = self._first, self._ids
        if before is not None and start < first <= start + before.shape[1]:
            ids, first = torch.cat([before[:, : first - start].to(ids), ids], 1), start
        self._ids, self._first = ids, first

    def _compare(
        self, given: Tensor, first: int, seen: int, embed: Callable[[Tensor], Tensor] | None
    ) -> None:
        """Raise if ids or marks, from `first` of the stream on, are others than were given before.

        What came as embeddings is known by its marks, whatever ids came with it.
        """
        known, after = [(self._marks, self._start)], 0
        if self._marks is not None:
            after = self._start + self._marks.shape[1]
        known.append((self._ids, self._first))
        for (before, start), least in zip(known, (0, after), strict=True):
            if before is None or len(before) != len(given):
                continue
            least = max(first, start, least)
            stop = min(first + given.shape[1], start + before.shape[1], seen)
            if least >= stop:
                continue
            pair = given[:, least - first : stop - first], before[:, least - start : stop - start]
            differ = _differ(*pair, embed)
            if bool(differ.any()):
                raise ModelError(
                    f"token {least + int(differ.int().argmax())} of this prompt is another one "
                    f"than the cache took in there: it holds {seen} tokens of another sequence; "
                    f"{RESET}"
                )


def marks(embeds: Tensor) -> Tensor:
    """Few sums by which embeddings `[B, N, E]` are known again, `[B, N, 8]` in fp32.

    An image that is embedded again differs by rounding.
    """
    coin = torch.Generator().manual_seed(0)
    signs = torch.randint(2, (embeds.shape[-1], _SIGNS), generator=coin, device="cpu") * 2 - 1
    return embeds.detach().float() @ signs.to(embeds.device, torch.float32)


def _differ(mine: Tensor, before: Tensor, embed: Callable[[Tensor], Tensor] | None) -> Tensor:
    """Which tokens `[N]` of ids `[B, N]` or marks `[B, N, 8]` differ, in any row."""
    before = before.to(mine.device)
    if mine.dim() == before.dim() == 2:
        return (mine != before).any(0)
    if embed is None:
        return torch.zeros(mine.shape[1], dtype=torch.bool, device="cpu")
    one, other = (marks(embed(x)).to(mine.device) if x.dim() == 2 else x for x in (mine, before))
    apart = (one - other).abs() > CLOSE * other.abs().mean(-1, keepdim=True)
    return apart.any(-1).any(0)


def again(seen: int, first: int, many: int) -> str:
    """The sentence on a call whose `many` tokens have positions from `first` on.

    The cache has `seen` more than `first`.
    """
    what = f"this call brings tokens {first} to {first + many - 1} to a cache that has seen {seen}"
    if not first and many == seen + 1:
        return (
            f"{what}, the whole sequence again, as generate() does where use_cache is False in its "
            "arguments, in model.generation_config or in model.config; set use_cache=True and call "
            "the cache's reset()"
        )
    if not first and many == seen:
        return (
            f"{what}: the prompt was taken in already; give generate() the conversation with at "
            "least one more token, or call the cache's reset()"
        )
    return f"{what}, so it holds another sequence, or these tokens already; {RESET}"


def require_tokens(many: int, seen: int) -> None:
    """Raise a `ModelError` if a call brings no token, as where `generate` cut all of them off."""
    if seen and not many:
        raise ModelError(
            f"this call brings no token to a cache that has seen {seen}: they are those of another "
            f"sequence, or all of this one; {RESET}"
        )


def watch_generate(model: PreTrainedModel) -> None:
    """Let the caches that `generate` of `model` is given see what it prepares for them."""
    name = "prepare_inputs_for_generation"
    for kind in {GenerationMixin, next(x for x in type(model).__mro__ if name in vars(x))}:
        plain = vars(kind)[name]
        if not hasattr(plain, "kvsearch"):
            made = _comparing(plain) if kind is GenerationMixin else _keeping(plain)
            made.kvsearch = True  # type: ignore[attr-defined]
            setattr(kind, name, made)


def _comparing(plain: Callable[..., Any]) -> Callable[..., Any]:
    """The function of all models, which lets a cache compare what comes with what was there."""

    @wraps(plain)
    def prepare(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        cache: Any = kwargs.get("past_key_values")
        if getattr(cache, "given", None) is not None:
            _take(self, cache, input_ids, kwargs.get("next_sequence_length"), kwargs)
        return plain(self, input_ids, *args, **kwargs)

    return prepare


def _keeping(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A model's own function, which may put the cache aside, as where its angles change."""

    @wraps(plain)
    def prepare(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        cache: Any = kwargs.get("past_key_values")
        found = plain(self, input_ids, *args, **kwargs)
        if getattr(cache, "given", None) is None or found.get("past_key_values") is cache:
            return found
        if seen := cache.get_seq_length():
            raise ModelError(
                f"{type(self).__name__} begins anew without the cache, which has seen {seen} "
                "tokens, as models do where their rotary angles change; stop before, or call the "
                "cache's reset() and give generate() all tokens again, so that they are one prompt"
            )
        _take(self, cache, input_ids, None, kwargs)
        return {**found, "past_key_values": cache}  # nothing is lost: these are all tokens

    return prepare


def _take(model: Any, cache: Any, ids: Any, fed: int | None, kwargs: dict[str, Any]) -> None:
    if not isinstance(ids, Tensor):
        return
    prompt = bool(kwargs.get("is_first_iteration"))
    cache.given.take(
        ids, cache.get_seq_length(), fed, prompt=prompt,
        use_cache=kwargs.get("use_cache") is not False,
        embeds=kwargs.get("inputs_embeds") if prompt else None,
        embed=model.get_input_embeddings(),
    )  # fmt: skip
