"""A prompt is read again by its model before its cache is compacted (KVzip, arXiv:2505.23416).

A hook on the model's body runs this right after the call that brought the prompt: the model is fed
an instruction and the prompt once more, chunk by chunk. Its queries see all of the cache and what
comes with them, and nothing of that is stored. Then all layers are compacted. So whoever calls the
model, `generate` or an evaluation, has a compacted cache after the call.
"""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel

from kvsearch.cache.by_segment import eviction
from kvsearch.cache.call import Call
from kvsearch.cache.head_group import HeadGroup
from kvsearch.cache.layer import Layer
from kvsearch.cache.references import References
from kvsearch.errors import PolicyError
from kvsearch.models.load import max_context
from kvsearch.models.shape import body
from kvsearch.policy import Policy
from kvsearch.rules import Reread
from kvsearch.rules.reread import RereadScorer
from kvsearch.workloads.text.borders import encoder, inside

FIRST = "\n\nRepeat the previous context exactly.\n"  # as the paper's public code has it
LATER = "\n\nRepeat the part of the previous context exactly, starting with"
BEFORE = 8  # tokens before a chunk that follow these words, and then END
END = "\n"
ROWS = 512  # queries per attention map
CPU_ROWS = 64  # whose maps stay in a CPU's cache


class Rereading:
    """What the model of a cache reads after a prompt.

    Args:
        rule: of the policy; None where nothing is read, and layers wait for each other only.
        first: token ids that come before the first chunk.
        following: token ids that come before the others, and the tokens before each of these.
        end: token ids after those.
    """

    def __init__(
        self, rule: Reread | None, first: Sequence[int], following: Sequence[int],
        end: Sequence[int],
    ) -> None:  # fmt: skip
        self.rule, self._first, self._following, self._end = rule, first, following, end
        self._reads = False

    def __deepcopy__(self, memo: dict[int, Any]) -> "Rereading":
        return self

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # calls the model again
    def after(self, body: nn.Module, cache: Any, ids: Tensor | None) -> None:
        """Let `body` read again the prompt of tokens `ids` `[B, N]` that `cache` has taken in."""
        layers: list[Layer] = [layer for layer in cache.held if layer.holds]
        if self._reads or not any(layer.rereads for layer in layers):
            return
        if self.rule is not None:
            self._again(self.rule, body, cache, ids)
        for layer in layers:
            layer.rereads = False
        if layers[0].policy.budgets.across == "model":
            eviction.compact(layers, layers[0].seen)
            return
        for layer in layers:
            eviction.finish(layer, layer.seen)

    def _again(self, rule: Reread, body: nn.Module, cache: Any, ids: Tensor | None) -> None:
        """Read the prompt `ids` `[B, N]` again, and score it."""
        if ids is None:
            raise PolicyError(
                f"rule {rule.name!r} reads the prompt again, and this call brings no token "
                "ids; give input_ids instead of embeddings"
            )
        chunks = list(self._chunks(rule, ids))
        _require_room(rule, body, ids.shape[1], max(x.shape[1] for _, x in chunks))
        others = {i: x for i, x in enumerate(cache.layers) if not hasattr(x, "held")}
        self._reads = True
        try:
            with torch.no_grad():
                for start, again in chunks:
                    stop = min(start + rule.chunk, ids.shape[1])
                    _read(body, cache, others, range(start, stop), ids.shape[1], again)
        finally:
            self._reads = False
            for layer in cache.held:
                layer.reading = None

    def _chunks(self, rule: Reread, ids: Tensor) -> "list[tuple[int, Tensor]]":
        """Where each chunk starts, and what is read of it `[B, M]`."""
        found = []
        for start in range(0, ids.shape[1], rule.chunk):
            words = self._first
            parts = [ids[:, start : start + rule.chunk]]
            if start and self._first:
                words = self._following
                parts = [ids[:, max(0, start - BEFORE) : start], _rows(self._end, ids), *parts]
            found.append((start, torch.cat([_rows(words, ids), *parts], 1)))
        return found


def _read(
    body: nn.Module, cache: Any, others: dict[int, Any], chunk: range, seen: int, again: Tensor
) -> None:
    """Read one chunk of `seen` tokens; layers without a policy are as before afterwards."""
    for held in cache.held:
        held.reading = chunk
    for i, layer in others.items():
        cache.layers[i] = deepcopy(layer)
    body(input_ids=again, past_key_values=cache, use_cache=True)
    for i, layer in others.items():
        cache.layers[i] = layer
    for held in cache.held:
        held.seen = seen  # layers without attention count what they are given


def _require_room(rule: Reread, body: Any, prompt: int, again: int) -> None:
    most = max_context(body.config)
    if most is not None and prompt + again > most:
        raise PolicyError(
            f"rule {rule.name!r} reads a prompt of {prompt} tokens again, up to position "
            f"{prompt + again}, and the model's positions reach {most}; shorten the prompt, "
            "lower rule.chunk or take another rule"
        )


def attend(layer: Layer, call: Call) -> Tensor:
    """Attend from tokens that are read again, over all slots and themselves, and score the chunk.

    Nothing is stored but scores.
    """
    chunk = layer.reading
    assert chunk is not None
    if layer.policy.refits:
        layer.references.append(References.of(call, layer.prompt))

    def attended(group: HeadGroup, mine: Call) -> Tensor:
        keys, values = group.read()
        n, sinks = keys.shape[2], min(group.layout.policy.sinks, chunk.start)
        keys = torch.cat([keys, mine.k.to(keys.dtype)], 2)
        values = torch.cat([values, mine.v.to(values.dtype)], 2)
        out, scores = read(mine.q, keys, values, n, chunk, sinks, **call.how)
        if isinstance(group.scorer, RereadScorer):  # some heads may decide nothing by rank
            group.scorer.take(chunk.start, scores, n)
        return out

    return layer.each(call, attended)


def read(
    q: Tensor, k: Tensor, v: Tensor, n: int, chunk: range, sinks: int, *, scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output and scores of tokens that are read again.

    Args:
        q: their queries `[B, Hq, M, D]`.
        k, v: keys and values `[B, H, n + M, D]`, their own behind those that are held.
        n: slots that are held.
        chunk: those that are scored.
        sinks: first slots that compete with these for attention.
        scale: factor on the dot products.
        softcap: bound of the scaled products, if the model has one.

    Returns:
        Output `[B, Hq, M, Dv]` over all keys; and `[B, H, len(chunk)]` fp32, the largest share that
        a query of the group gives to each slot of the chunk, of all that it gives to sinks, chunk
        and the tokens that are read again.
    """
    B, Hq, M, D = q.shape
    H, N = k.shape[1], k.shape[2]
    G, kind = Hq // H, torch.promote_types(q.dtype, torch.float32)
    own = torch.arange(M, device=q.device)
    k, v, q = k.to(kind), v.to(kind), q.to(kind) * scale
    out, best = q.new_empty(B, Hq, M, v.shape[3]), None
    left = sinks < chunk.start or chunk.stop < n  # slots that do not compete
    step = CPU_ROWS if q.device.type == "cpu" else ROWS
    for start in range(0, M, step):
        rows = own[start : start + step]
        s = q[:, :, start : start + step].reshape(B, H, G * len(rows), D) @ k.transpose(-1, -2)
        if softcap is not None:
            s = softcap * torch.tanh(s / softcap)
        s = s.view(B, H, G, len(rows), N)
        s[..., n:].masked_fill_(own > rows[:, None], float("-inf"))
        scored = s[..., chunk.start : chunk.stop]
        if left:
            rivals = torch.cat([s[..., :sinks], scored, s[..., n:]], -1)
            most = (scored - rivals.logsumexp(-1, keepdim=True)).amax((2, 3)).exp()
        p = s.softmax(-1)
        if not left:
            most = p[..., chunk.start : chunk.stop].amax((2, 3))
        best = most if best is None else torch.maximum(best, most)
        part = p.view(B, H, G * len(rows), N) @ v
        out[:, :, start : start + step] = part.view(B, Hq, len(rows), -1)
    assert best is not None
    return out, best.float()


def _rows(ids: Sequence[int], like: Tensor) -> Tensor:
    """These ids for every sequence of `like` `[B, N]`."""
    return like.new_tensor(list(ids)).expand(len(like), -1)


# -- hooks and tokens --------------------------------------------------------------------------

_watched: WeakKeyDictionary[PreTrainedModel, None] = WeakKeyDictionary()


def rereading(policy: Policy, model: PreTrainedModel, tokenizer: Any) -> Rereading | None:
    """What a cache for `model` does after a prompt; None if its layers go by themselves.

    Raises:
        PolicyError: the rule has an instruction, and no tokenizer is given or lies with the model.
    """
    rule = policy.active_rule
    if rule is None or not (policy.rereads or policy.budgets.across == "model"):
        return None
    if model not in _watched:
        body(model).register_forward_hook(_after, with_kwargs=True)
        _watched[model] = None
    if not isinstance(rule, Reread):
        return Rereading(None, (), (), ())
    if rule.instruction == "none":
        return Rereading(rule, (), (), ())
    encode = encoder(tokenizer if tokenizer is not None else _beside(model))
    return Rereading(rule, *(inside(encode, text) for text in (FIRST, LATER, END)))


def _beside(model: PreTrainedModel) -> Any:
    """The tokenizer that lies with a model's weights; nothing is fetched."""
    try:
        return AutoTokenizer.from_pretrained(model.name_or_path, local_files_only=True)
    except (OSError, ValueError, KeyError) as e:
        raise PolicyError(
            "field rule.instruction: the tokens of an instruction depend on the tokenizer; give "
            "it, as in PolicyCache(policy, model, tokenizer=tokenizer)"
        ) from e


def _after(body: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    cache = kwargs.get("past_key_values")
    mine: Rereading | None = getattr(cache, "rereading", None)
    if cache is not None and mine is not None:
        mine.after(body, cache, kwargs.get("input_ids", args[0] if args else None))
