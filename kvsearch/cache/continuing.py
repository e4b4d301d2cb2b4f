"""Whether a call goes on with the sequence that a cache holds.

`generate` is given whole sequences, and transformers cuts off as many of their first tokens as the
cache has seen, whichever those are. Here what is given is compared with what was given before: a
wrapper around `GenerationMixin.prepare_inputs_for_generation`, once a process, does nothing for
other caches.
"""

from functools import wraps
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin

from kvsearch.errors import ModelError, PolicyError

RESET = "call the cache's reset() before the next prompt, or make a cache for each"


class Given:
    """Token ids that `generate` gave a cache, as far as they are known.

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
        self._pieces = 0  # of a prompt, since `generate` began
        self._begins = False  # whether the call before brought a piece of a prompt
        self._due: int | None = None  # where the ids after a prompt begin, if nothing is added
        self._added = 0  # tokens that the model put before those that it was given

    def begin(self) -> None:
        """`generate` begins."""
        self._pieces = 0

    def take(
        self, ids: Tensor, seen: int, fed: int | None, *, prompt: bool, use_cache: bool
    ) -> None:
        """Look at what `generate` prepares for a cache that has seen `seen` tokens.

        Args:
            ids: what it was given `[B, N]`.
            seen: tokens.
            fed: how many of the last ids come next; None is all of them.
            prompt: whether these are the first of this `generate`.
            use_cache: its option.

        Raises:
            ModelError: the cache would take in tokens twice, or tokens of another sequence.
            PolicyError: a prompt comes in pieces, and the policy needs it in one call.
        """
        if seen and not prompt and fed is None and not use_cache:
            raise ModelError(again(seen, 0, seen + 1))
        count = ids.shape[1]
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
        self._due = first if prompt and self._pieces == 1 else None
        if prompt and seen and fed is not None and self._added:
            raise ModelError(
                f"the model put {self._added} tokens of its own before the prompt, as in prompt "
                f"tuning, and generate() would cut off as many of the new ones; {RESET}"
            )
        if seen and (prompt or self._begins):
            self._compare(ids, first, seen)
            if prompt and fed is not None and count <= seen:
                raise ModelError(again(seen, 0, count))
        self._begins = prompt and fed is None and seen > 0
        if fed is not None or not seen:  # else these are a piece of a prompt
            self._ids, self._first = ids, first

    def _compare(self, ids: Tensor, first: int, seen: int) -> None:
        """Raise if ids, from `first` of the stream on, are not those that were given before."""
        known = self._ids
        if known is None or len(known) != len(ids):
            return
        start = max(first, self._first)
        stop = min(first + ids.shape[1], self._first + known.shape[1], seen)
        if start >= stop:
            return
        mine = ids[:, start - first : stop - first]
        before = known[:, start - self._first : stop - self._first].to(ids.device)
        if not torch.equal(mine, before):
            differ = (mine != before).any(0).int()
            raise ModelError(
                f"token {start + int(differ.argmax())} of this prompt is another one than the "
                f"cache took in there: it holds {seen} tokens of another sequence; {RESET}"
            )


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


def watch_generate() -> None:
    """Let the caches that `generate` is given see what it prepares for them."""
    plain = GenerationMixin.prepare_inputs_for_generation
    if hasattr(plain, "kvsearch"):
        return

    @wraps(plain)
    def prepare(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        cache: Any = kwargs.get("past_key_values")
        given: Given | None = getattr(cache, "given", None)
        prompt = bool(kwargs.get("is_first_iteration"))
        embedded = prompt and kwargs.get("inputs_embeds") is not None
        if given is not None and isinstance(input_ids, Tensor) and not embedded:
            given.take(
                input_ids, cache.get_seq_length(), kwargs.get("next_sequence_length"),
                prompt=prompt, use_cache=kwargs.get("use_cache") is not False,
            )  # fmt: skip
        return plain(self, input_ids, *args, **kwargs)

    prepare.kvsearch = True  # type: ignore[attr-defined]
    GenerationMixin.prepare_inputs_for_generation = prepare
