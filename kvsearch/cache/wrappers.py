"""Wrappers around transformers: of attention functions, and of what `generate` prepares.

A cache layer marks the keys it returns with itself. Models ask transformers' `AttentionInterface`
for a function by the name in their config; what they are given is wrapped, once a process: it looks
for the mark and lets the layer attend over what it holds, or else calls the function that was asked
for. So nothing of a model is changed. What a policy layer would silently get wrong is refused here.

`generate` is given whole sequences, and transformers cuts off as many of their first tokens as the
cache has seen, whichever those are. Here what is given is compared with what was given before; for
other caches nothing is done.
"""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_mask
from transformers import AttentionInterface, GenerationMixin

from kvsearch.cache import padded
from kvsearch.cache.layer import Layer
from kvsearch.cache.padded import PaddedBatch
from kvsearch.errors import ModelError, PolicyError
from kvsearch.models.shape import shape_of, text_config

MARK = "kvsearch_layer"
_PLAIN = "kvsearch_plain"
RESET = "call the cache's reset() before the next prompt, or make a cache for each"
_BEYOND = {  # what a model may ask of attention that a policy layer does not do
    "s_aux": "learned attention sinks",
    "sinks": "learned attention sinks",
    "position_bias": "a position bias",
    "indices": "sparse attention",
    "block_indices": "sparse attention",
    "sliding_window": "a sliding window that its config does not name",
    "cu_seq_lens_q": "packed sequences",
}


class Attending(Protocol):
    """A cache layer that attends over its own slots."""

    held: Layer
    waits: bool
    config: Any
    padded: PaddedBatch | None

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: float | None
    ) -> Tensor:
        """Take in new tokens and attend from them, as `ways.advance` does."""


def route() -> None:
    """Let every attention function that a model asks for look for marked keys first."""
    plain = AttentionInterface.get_interface
    if hasattr(plain, MARK):
        return

    @wraps(plain)
    def get_interface(self: Any, name: Any, default: Any) -> Callable[..., Any]:
        return partial(attention, plain(self, name, default))

    setattr(get_interface, MARK, True)
    AttentionInterface.get_interface = get_interface


def attention(
    plain: Callable[..., Any], module: nn.Module, query: Tensor, key: Tensor, *args: Any,
    **kwargs: Any,
) -> Any:  # fmt: skip
    """Attend through the policy layer that marked `key`, or through `plain` if none did."""
    layer: Attending | None = getattr(key, MARK, None)
    if layer is None:
        return plain(module, query, key, *args, **kwargs)
    return _attend(layer, module, query, key, *args, **kwargs)


def _attend(
    layer: Attending,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    layer.waits = False
    if (config := getattr(module, "config", None)) is not layer.config:
        _refuse_other(layer, config)
    kwargs.setdefault("is_causal", getattr(module, "is_causal", None))
    _refuse(layer, query, attention_mask, kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = layer.attend(query, key, value, scale=scale, softcap=softcap)
    if layer.padded is not None:
        layer.held.seen += query.shape[2]  # padding included, as transformers counts
    return out.transpose(1, 2).contiguous(), None


def _refuse_other(layer: Attending, config: Any) -> None:
    """Refuse a model whose layers have another shape or other angles than the cache's own."""
    if config is None:
        return
    if layer.config is not None and _kind(config) != _kind(layer.config):
        raise ModelError(
            "this cache was made for another model, with layers of another shape or other "
            "rotary angles; make one with PolicyCache(policy, model)"
        )
    layer.config = config


def _kind(config: Any) -> tuple[object, ...]:
    """What a cache relies on of a model."""
    text = text_config(config)
    return shape_of(config), text.model_type, getattr(text, "rope_parameters", None)


def _pad(layer: Attending, query: Tensor, mask: Tensor | None, ids: Tensor | None) -> bool:
    """Whether rows of the batch are padded in front; from their first call on the layer knows."""
    held, seen, n = layer.held, layer.held.seen, layer.held.seen + query.shape[2]
    plain = bool(held.groups) and held.stream is None  # a layer that holds, and no anchors
    plain = plain and not held.rereads  # its second reading takes rows of equal length
    if plain and layer.padded is None and not seen and mask is not None:
        found = getattr(mask, padded.KNOWN, None)  # another layer has looked
        if found is None and not getattr(mask, _PLAIN, False):
            shown = _shown(mask, query, n)
            found = None if shown is None else padded.left(shown, len(query), n)
            setattr(mask, padded.KNOWN, found)  # all layers of one call are given the same mask
        if found is not None:
            layer.padded = PaddedBatch(found, [held.copied() for _ in found])
    if layer.padded is None:
        return False
    if seen and mask is not None and (shown := _shown(mask, query, n)) is not None:
        newest = shown if shown.dim() == 2 else shown[:, 0, -1]
        if len(newest) != len(query) or (~newest).sum(-1).tolist() != layer.padded.padding:
            raise ModelError(
                "the attention mask of this call hides other tokens than the padding of the first "
                "one; give one that has grown by the tokens of the call"
            )
    padded.require_rows(layer.padded, held, ids)
    return True


def _refuse(layer: Attending, query: Tensor, mask: Tensor | None, extra: dict[str, Any]) -> None:
    """Say what a policy layer would otherwise silently get wrong."""
    held = layer.held
    for name, what in _BEYOND.items():
        if extra.get(name) is not None:
            raise ModelError(f"models with {what} are not supported by a policy cache")
    if extra.get("is_causal") is False:
        raise ModelError("models whose attention is not causal are not supported by a policy cache")
    ids = extra.get("position_ids")
    if _pad(layer, query, mask, ids):
        return
    if held.seen:  # padding is refused at the first tokens
        _compare(held, query, ids)
    if mask is not None and not getattr(mask, _PLAIN, False):
        _refuse_hidden(held, query, mask)
        setattr(mask, _PLAIN, True)  # all layers of one call are given the same mask
    if not held.seen:
        _compare(held, query, ids)


def _refuse_hidden(held: Layer, query: Tensor, mask: Tensor | BlockMask) -> None:
    """Refuse a mask, of whatever attention function, that is not the causal one."""
    m, n = query.shape[2], held.seen + query.shape[2]
    shown = _shown(mask, query, n)
    if shown is None:
        return
    if shown.dim() == 2:  # flash attention's, of the tokens so far
        plain = torch.ones(n, dtype=torch.bool, device=shown.device)
    else:
        plain = torch.ones(m, n, dtype=torch.bool, device=shown.device).tril(n - m)
    if shown.shape[-plain.dim() :] == plain.shape and bool((shown == plain).all()):
        return
    newest = shown[..., -1] if shown.dim() == 2 else shown[..., -1, -1]
    if held.seen and (shown.shape[-1] < n or not bool(newest.all())):
        raise ModelError(
            f"the attention mask of this call has no columns for all of the {held.seen} tokens "
            f"that the cache has seen and the {m} of the call; give one for all of them, or none, "
            "and if the call repeats tokens, call the cache's reset() before it"
        )
    raise ModelError(
        "a policy cache attends to all earlier tokens, and this mask hides some or shows "
        "later ones: a batch may be padded in front of its prompts only, and not under a policy "
        "with anchors or a second reading of the prompt; give prompts of equal length"
    )


def _shown(mask: Tensor | BlockMask, query: Tensor, n: int) -> Tensor | None:
    """What a mask shows, as booleans; None where it costs too much to look at a single token's.

    Of eager and flex attention these are made whether or not they hide anything, and what hides
    something hid it from the prompt.
    """
    m = query.shape[2]
    if isinstance(mask, BlockMask):
        return None if m == 1 else create_mask(mask.mask_mod, len(query), 1, m, n, query.device)
    if mask.dtype == torch.bool or mask.dim() == 2:
        return mask.bool()
    return mask == 0 if m > 1 or mask.is_cpu else None


def _compare(held: Layer, query: Tensor, ids: Tensor | None) -> None:
    """Compare positions `[B or 1, M]`, where the model hands them over, with what was seen."""
    m, seen = query.shape[2], held.seen
    cheap = m > 1 or query.device.type == "cpu"  # one look costs a GPU a wait
    if ids is None or ids.dim() != 2 or not cheap or not (seen or held.reindex):
        return
    if getattr(ids, _PLAIN, None) == seen:  # all layers of a call share the positions
        return
    first = int(ids[:, 0].min())
    if first < seen:
        raise ModelError(again(seen, first, m))
    if held.reindex:
        want = torch.arange(seen, seen + m, device=ids.device)
        if not bool((ids == want).all()):
            raise ModelError(
                f"positions 'cache' counts tokens from the start of the stream: expected position "
                f"{seen} for the next token, got {first}"
            )
    setattr(ids, _PLAIN, seen)


# -- whether a call of `generate` goes on with the sequence that a cache holds ------------------


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
