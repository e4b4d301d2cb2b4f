"""Tokens of a whole model as CUDA graphs: what one token launches is repeated for those after it.

A GPU needs a few milliseconds for a token of a 7B model, and the host some ten times as long to
launch it, kernel by kernel. But between two tokens nothing changes but data, also across the
compactions of a full cache: where slots lie is in tables on the device (`decoding`). So a token's
launches are recorded once two tokens in a row have launched the same. From then on a token is one
launch, counting, and a compaction where that is due.

The first token that is repeated, and the first one after slots have moved, are also computed as
ever, by a copy of the cache. If the two differ there is a warning, and no more graphs.
"""

import os
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from kvsearch.cache import decoding
from kvsearch.cache.call import Call
from kvsearch.cache.cuda.captures import NotCaptured, aside
from kvsearch.cache.huggingface import PolicyCache, PolicyLayer
from kvsearch.cache.layer import Layer
from kvsearch_kernels.launch import on

ERROR = 2  # rounding errors of the type, of the largest number, that a repeated token may be off
LEAST_ERROR = 1e-4  # the same in types of 32 and more bits
_READ = ("input_ids", "past_key_values", "position_ids", "attention_mask", "cache_position")


@dataclass
class Decoded:
    """Tokens that a model has decoded into policy caches, one a sequence in each call.

    Attributes:
        repeated: by replays of a CUDA graph.
        computed: as ever.
    """

    repeated: int = 0
    computed: int = 0


@contextmanager
def cuda_graphs(model: PreTrainedModel) -> Iterator[Decoded]:
    """Inside, tokens that `model` decodes into a `PolicyCache` are replays of a CUDA graph.

    That holds for calls of the model, as `generate` makes them, with one new token per sequence and
    without gradients. All others run as ever: prompts, other caches, and a `PolicyCache` of a model
    with sliding windows, over several GPUs, with anchors, a rule that reads queries, or without
    kernels for its policy. So do the first tokens after a prompt, and in a cache that still fills
    up the two after a compaction.
    Without a GPU, and under KVSEARCH_GRAPHS=0, nothing changes.

    A mask of attention is looked at with the prompt, as a policy cache refuses one that hides
    tokens, and not with tokens that are repeated; and hooks of the model's parts see only tokens
    that are computed.

    Args:
        model: the model, in no other thread; it is as it was afterwards.

    Returns:
        A context, which gives how many tokens were repeated so far.
    """
    if not serves(model):
        yield Decoded()
        return
    before, replays = model.__dict__.get("forward"), _Replays(model.forward)

    @wraps(model.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        asked = {"input_ids": args[0], **kwargs} if args else kwargs
        if len(args) > 1 or model.training or not _repeats(asked):
            return replays.plain(*args, **kwargs)
        return replays(**asked)

    model.forward = forward
    try:
        yield replays.decoded
    finally:
        del model.forward
        if before is not None:
            model.forward = before


def serves(model: PreTrainedModel) -> bool:
    """Whether tokens of a model may be recorded: it is on one GPU."""
    where = {p.device for p in model.parameters()}
    one = len(where) == 1 and next(iter(where)).type == "cuda"
    return one and os.environ.get("KVSEARCH_GRAPHS") != "0"


def _repeats(asked: dict[str, Any]) -> bool:
    """Whether a call of a model brings one token a sequence, and nothing that is not known here."""
    ids, cache = asked.get("input_ids"), asked.get("past_key_values")
    return (
        isinstance(cache, PolicyCache)
        and all(isinstance(layer, PolicyLayer) and not layer.padded for layer in cache.layers)
        and ids is not None and ids.shape[1] == 1
        and not any(isinstance(v, Tensor) for k, v in asked.items() if k not in _READ)
        and not torch.is_grad_enabled()
        and not torch.cuda.is_current_stream_capturing()  # captures do not nest
    )  # fmt: skip


@dataclass(frozen=True)
class _Recorded:
    """One token's launches.

    Attributes:
        given: what they are given, all that does not change with a token.
        again: launches them.
        out: what the model returns of them, tensors alone; overwritten by every launch.
        kind: the class of that.
        layers: those that attend, and what is like the token of each.
        others: layers without attention.
    """

    given: Hashable
    again: Callable[[], None]
    out: dict[str, Tensor]
    kind: type[ModelOutput]
    layers: Sequence[tuple[Layer, Call]]
    others: Sequence[Layer]


class _Tokens:
    """The tokens of one cache.

    Attributes:
        ids, positions: of the next token, where launches find them.
        last: what the launches of the last token that was not repeated were given.
        recorded: launches that can be repeated, or None.
        owed: proofs that are still to come: of a token, and of one after slots have moved.
        moved: whether they have, since the recording.
    """

    def __init__(self) -> None:
        self.ids: Tensor | None = None
        self.positions: Tensor | None = None
        self.last: Hashable = None
        self.recorded: _Recorded | None = None
        self.owed, self.moved = 2, False

    def given(self, cache: PolicyCache, asked: dict[str, Any], stream: int) -> Hashable:
        """What the launches of the next token are given; None if they cannot be repeated.

        A recording's memory is shared with others of its `stream`, so it serves on no other.
        """
        cast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
        places = asked.get("position_ids")
        found: list[Hashable] = [stream, cast, torch.is_inference_mode_enabled()]
        found.append(asked["input_ids"].shape)
        found.append(None if places is None else places.shape)
        found.append(tuple(sorted((k, v) for k, v in asked.items() if k not in _READ)))
        for layer in cache.layers:
            assert isinstance(layer, PolicyLayer)
            layer.held.enter()
            launches = decoding.launches(layer.held)
            if launches is None:
                return None
            found.append(launches)
        return tuple(found)

    def put(self, asked: dict[str, Any], seen: int) -> None:
        """Let launches find the next token, which `seen` tokens precede."""
        ids, places = asked["input_ids"], asked.get("position_ids")
        if places is None:
            places = ids.new_full((1, 1), seen)
        self.ids, self.positions = _written(self.ids, ids), _written(self.positions, places)


def _written(place: Tensor | None, x: Tensor) -> Tensor:
    """`x` at its `place`, or at another: what inference mode has made changes in no other mode."""
    if place is not None and place.is_inference() and not torch.is_inference_mode_enabled():
        place = None
    if place is None or place.shape != x.shape:
        place = torch.empty_like(x)
    return place.copy_(x)


class _Replays:
    """A model's tokens, repeated where they launch the same.

    Attributes:
        plain: calls the model as ever.
        decoded: how many tokens of either kind there were.
        held: the tokens of every cache that was met.
        refused: whether something went wrong.
    """

    def __init__(self, plain: Callable[..., Any]) -> None:
        self.plain, self.refused, self.decoded = plain, False, Decoded()
        self.held: WeakKeyDictionary[PolicyCache, _Tokens] = WeakKeyDictionary()

    def __call__(self, **asked: Any) -> Any:
        """Call the model with one token a sequence."""
        cache, device = asked["past_key_values"], asked["input_ids"].device
        tokens, stream = self.held.setdefault(cache, _Tokens()), _stream(device)
        given = None if self.refused else tokens.given(cache, asked, stream)
        with on(device):
            if tokens.recorded is not None and tokens.recorded.given == given:
                self.decoded.repeated += 1
                return self._repeat(cache, tokens, asked)
            self.decoded.computed += 1
            tokens.recorded = None
            if given is None or given != tokens.last:
                tokens.last = given
                return self.plain(**asked)
            with aside() as record:
                out = self.plain(**asked)
                if _plain(out) and tokens.given(cache, asked, stream) == given:
                    self._record(cache, tokens, asked, given, record)
        return out

    def _record(
        self, cache: PolicyCache, tokens: _Tokens, asked: dict[str, Any], given: Hashable,
        record: Callable[[Callable[[], object]], Callable[[], None]],
    ) -> None:  # fmt: skip
        """Record the launches of the next token, which changes nothing."""
        tokens.put(asked, 0)
        more = {k: v for k, v in asked.items() if k not in ("attention_mask", "cache_position")}
        more |= {"input_ids": tokens.ids, "position_ids": tokens.positions}
        made: list[Any] = []

        def launch() -> None:
            with decoding.recording() as layers:
                made[:] = [self.plain(**more), layers]

        seen = [(layer, layer.seen) for layer in cache.held]
        try:
            again = record(launch)
        except NotCaptured as fault:
            self._refuse(str(fault))
            return
        finally:
            for layer, count in seen:
                layer.seen = count
        out, layers = made
        met = {id(layer) for layer, _ in layers}
        others = [layer for layer in cache.held if id(layer) not in met]
        held = {name: x for name, x in out.items() if isinstance(x, Tensor)}
        tokens.recorded = _Recorded(given, again, held, type(out), layers, others)

    def _repeat(self, cache: PolicyCache, tokens: _Tokens, asked: dict[str, Any]) -> Any:
        """Take in a token by launches that were recorded."""
        recorded = tokens.recorded
        assert recorded is not None
        proves = tokens.owed == 2 or (tokens.owed == 1 and tokens.moved)
        copy = deepcopy(cache) if proves else None
        tokens.put(asked, cache.held[0].seen)
        recorded.again()
        out = {name: x.clone() for name, x in recorded.out.items()}
        for layer, token in recorded.layers:
            tokens.moved |= decoding.taken(layer, token)
        for layer in recorded.others:
            layer.seen += 1
        if copy is not None:
            want = self.plain(**{**asked, "past_key_values": copy})
            if not all(_alike(x, want[name]) for name, x in out.items()):
                self._refuse("a token that was repeated differs from what its launches give")
                cache.layers = copy.layers
                want["past_key_values"] = cache
                return want
            tokens.owed -= 1
        return recorded.kind(**out, past_key_values=cache)

    def _refuse(self, reason: str) -> None:
        """Record no more."""
        self.refused = True
        self.held.clear()
        warnings.warn(f"no CUDA graphs of tokens: {reason}", RuntimeWarning, stacklevel=2)


def _stream(device: torch.device) -> int:
    """The stream that work on a device is sent to now."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def _plain(out: object) -> bool:
    """Whether what a model returned is tensors and the cache alone."""
    return isinstance(out, ModelOutput) and all(
        isinstance(x, Tensor) or name == "past_key_values" for name, x in out.items()
    )


def _alike(x: Tensor, want: Tensor) -> bool:
    """Whether two results of the same launches are equal but for rounding."""
    if not x.is_floating_point():
        return torch.equal(x, want)
    most = max(LEAST_ERROR, ERROR * torch.finfo(x.dtype).eps) * want.abs().max()
    return bool((x - want).abs().max() <= most)  # NaN is unlike everything
