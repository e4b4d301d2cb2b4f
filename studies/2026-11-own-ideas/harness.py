"""A model over caches that the package does not have: slots with any keys, values and bias.

A plain forward pass of a Llama model. A context is taken in with every slot; then questions and
their answers attend to the context's slots, of which every KV head may have lost some, changed the
keys and values of others, and add a bias to their logits. Keys and values are stored in fp16, as in
the package; `measure.py check` compares both.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, normalize, silu
from transformers.models.llama.modeling_llama import rotate_half

from kvsearch.cache.rereading import FIRST
from kvsearch.evaluation.evaluator import Evaluator
from kvsearch.models.load import LoadedModel
from kvsearch.workloads.items import Ask
from kvsearch_kernels.quantize_kv.reference import Format, fake_quantize

NONE = float("-inf")
SINKS, WINDOW, POOL = 4, 32, 5  # of SnapKV: queries that are observed, slots that are smoothed
NEXT = 32  # slots over which CaM spreads a value


@dataclass(frozen=True)
class Slots:
    """What a model attends to, of every layer.

    Attributes:
        keys: rotated `[L, H, N, D]`.
        values: `[L, H, N, D]`.
        bias: on the logits `[L, H, N]`; minus infinity for what was evicted.
    """

    keys: Tensor
    values: Tensor
    bias: Tensor


@dataclass(frozen=True)
class Context:
    """A context that was taken in.

    Attributes:
        full: every slot.
        plain: keys before their rotation `[L, H, N, D]`.
        total: attention that each slot received, mean over the query heads of a group `[L, H, N]`.
        window: the same of the last `WINDOW` queries.
        again: the most attention when the context is read again `[L, H, N]`, or None.
        last: hidden state of the last token `[d]`.
    """

    full: Slots
    plain: Tensor
    total: Tensor
    window: Tensor
    again: Tensor | None
    last: Tensor

    @property
    def size(self) -> int:
        """Tokens."""
        return self.total.shape[-1]

    @property
    def mean(self) -> Tensor:
        """Attention over the number of queries that could give it `[L, H, N]`."""
        return self.total / torch.arange(self.size, 0, -1)


class Plain:
    """A Llama model, layer by layer; batch rows are asks of one context.

    Args:
        loaded: the model.
        native: in which keys and values are stored.
    """

    def __init__(self, loaded: LoadedModel, native: torch.dtype = torch.float16) -> None:
        self.native = native
        body, config = loaded.model.model, loaded.model.config
        self.layers, self.body, self.head = body.layers, body, Evaluator(loaded).head
        self.H, self.Hq, self.D = (
            config.num_key_value_heads, config.num_attention_heads, config.head_dim
        )  # fmt: skip
        self.first = loaded.tokenizer(FIRST, add_special_tokens=False)["input_ids"]

    def stored(self, x: Tensor) -> Tensor:
        """As the cache holds it."""
        return x.to(self.native).float()

    def angles(self, start: int, count: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of so many positions `[count, D]`."""
        at = torch.arange(start, start + count)[None]
        cos, sin = self.body.rotary_emb(torch.zeros(1), at)
        return cos[0], sin[0]

    def projected(self, layer: int, x: Tensor, start: int) -> tuple[Tensor, ...]:
        """Queries, keys before and after rotation, values `[..., heads, T, D]` of `[..., T, d]`."""
        own = self.layers[layer]
        h, cos_sin = own.input_layernorm(x), self.angles(start, x.shape[-2])
        made = (getattr(own.self_attn, f"{n}_proj")(h) for n in "qkv")
        q, k, v = (m.unflatten(-1, (-1, self.D)).transpose(-2, -3) for m in made)
        return turned(q, *cos_sin), k, turned(k, *cos_sin), v

    def onward(self, layer: int, x: Tensor, heads: Tensor) -> Tensor:
        """Behind attention, whose heads are `[..., Hq, T, D]`."""
        own = self.layers[layer]
        x = x + own.self_attn.o_proj(heads.transpose(-2, -3).flatten(-2))
        h, mlp = own.post_attention_layernorm(x), own.mlp
        return x + mlp.down_proj(silu(mlp.gate_proj(h)) * mlp.up_proj(h))

    def take_in(self, ids: Sequence[int], *, again: bool) -> Context:
        """A context with every slot, and read again if asked for."""
        x, found = self.body.embed_tokens(torch.tensor(ids)), list[tuple[Tensor, ...]]()
        N = len(x)
        for i in range(len(self.layers)):
            q, plain, k, v = self.projected(i, x, 0)
            k, v = self.stored(k), self.stored(v)
            p = self._maps(q, k, causal(N)).softmax(-1)
            rows = p.mean(1)
            found.append((k, v, plain, rows.sum(1), rows[:, -WINDOW:].sum(1)))
            x = self.onward(i, x, (p @ v[:, None]).flatten(0, 1))
        k, v, plain, total, window = (torch.stack(part) for part in zip(*found, strict=True))
        full = Slots(k, v, torch.zeros(total.shape))
        score = self._read(full, [*self.first, *ids]) if again else None
        return Context(full, plain, total, window, score, self.body.norm(x)[-1])

    def _maps(self, q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        """Logits `[H, G, T, N]`."""
        return q.unflatten(0, (self.H, -1)) @ k[:, None].mT * self.D**-0.5 + mask

    def _read(self, full: Slots, ids: Sequence[int]) -> Tensor:
        """The most attention that any query of a second reading gives each slot `[L, H, N]`."""
        x, N, most = self.body.embed_tokens(torch.tensor(ids)), full.bias.shape[-1], []
        mask = torch.cat([torch.zeros(len(x), N), causal(len(x))], 1)
        for i in range(len(self.layers)):
            q, _, k, v = self.projected(i, x, N)
            k, v = torch.cat([full.keys[i], k], 1), torch.cat([full.values[i], v], 1)
            p = self._maps(q, k, mask).softmax(-1)
            most.append(p[..., :N].amax((1, 2)))
            x = self.onward(i, x, (p @ v[:, None]).flatten(0, 1))
        return torch.stack(most)

    # -- asks --------------------------------------------------------------------------------------

    def embedded(self, asks: Sequence[Ask]) -> Tensor:
        """Questions with the answers that are given, padded on the right `[A, M, d]`."""
        rows = [np.concatenate([a.question, a.answer[:-1]]) for a in asks]
        ids = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = row
        return self.body.embed_tokens(torch.from_numpy(ids))

    def layer(self, i: int, x: Tensor, caches: Sequence[Slots], n: int) -> Tensor:
        """One layer over asks `[V, A, M, d]`: a cache for each of the V rows, or one for all."""
        q, _, k, v = self.projected(i, x, n)
        k, v, (V, A, _, M, D) = self.stored(k), self.stored(v), q.shape
        own = q.unflatten(2, (self.H, -1)) @ k[:, :, :, None].mT * D**-0.5 + causal(M)
        out = torch.empty_like(q)
        for r in range(V):
            c = caches[r if len(caches) > 1 else 0]
            held = c.bias[i].amax(0) > NONE  # slots that any head has
            keys, values, bias = c.keys[i][:, held], c.values[i][:, held], c.bias[i][:, held]
            rows = q[r].unflatten(1, (self.H, -1)).movedim(1, 0).flatten(1, 3)  # [H, A*G*M, D]
            s = rows @ keys.mT * D**-0.5 + bias[:, None]
            s = s.view(self.H, A, -1, M, s.shape[-1]).movedim(0, 1)
            p = torch.cat([s, own[r]], -1).softmax(-1)
            old, new = p[..., :-M], p[..., -M:]
            found = old.movedim(1, 0).flatten(1, 3) @ values
            found = found.view(self.H, A, -1, M, D).movedim(0, 1) + new @ v[r][:, :, None]
            out[r] = found.flatten(1, 2)
        return self.onward(i, x, out)

    def answered(self, x: Tensor, asks: Sequence[Ask], last: Tensor) -> list[Tensor]:
        """Log-probabilities at the answers' tokens `[V, tokens, vocabulary]`, an ask each."""
        x = self.body.norm(x)
        found = []
        for a, ask in enumerate(asks):
            row = torch.cat([last.expand(len(x), 1, -1), x[:, a]], 1)
            here = row[:, ask.question.size : ask.question.size + ask.answer.size]
            found.append(self.head.logits(here).log_softmax(-1))
        return found

    def ask(self, context: Context, caches: Sequence[Slots], asks: Sequence[Ask]) -> list[Tensor]:
        """Log-probabilities of answers under several caches, as `answered` gives them."""
        x = self.embedded(asks).expand(len(caches), -1, -1, -1)
        for i in range(len(self.layers)):
            x = self.layer(i, x, caches, context.size)
        return self.answered(x, asks, context.last)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotated to positions."""
    return x * cos + rotate_half(x) * sin


def causal(count: int) -> Tensor:
    """A mask `[count, count]` to add."""
    return torch.full((count, count), NONE).triu(1)


# -- what stays ------------------------------------------------------------------------------------


def scores(rule: str, context: Context, recent: int) -> Tensor:
    """Ranks of the slots by a rule `[L, H, N]`, higher stays."""
    n = context.size - recent
    if rule == "snapkv":
        smooth = avg_pool1d(context.window[..., :n], POOL, 1, POOL // 2)
        return torch.cat([smooth, context.window[..., n:]], -1)
    if rule == "kvzip":
        assert context.again is not None
        return context.again
    if rule == "key norm":
        return -context.full.keys.norm(dim=-1)
    if rule == "recent":
        return torch.arange(context.size).float().expand(context.total.shape)
    return {"h2o": context.total, "mean": context.mean}[rule]


def kept(score: Tensor, allowed: Tensor | int, recent: int, *, across: bool = False) -> Tensor:
    """Which slots stay `[L, H, N]`: sinks, the newest, and the best of the others.

    Args:
        score: ranks `[L, H, N]`.
        allowed: slots of every head `[L, H]`; one number where `across`, their mean.
        recent: newest slots, which stay.
        across: one threshold for all heads of all layers.
    """
    N, fixed = score.shape[-1], SINKS + recent
    rank = score[..., SINKS : N - recent]
    mask = torch.ones(score.shape, dtype=torch.bool)
    if across:
        best = rank.flatten().topk((int(allowed) - fixed) * rank.shape[0] * rank.shape[1]).indices
        chosen = torch.zeros(rank.numel(), dtype=torch.bool).index_fill_(0, best, True)
        mask[..., SINKS : N - recent] = chosen.view(rank.shape)
        return mask
    place = rank.argsort(-1, descending=True).argsort(-1)
    room = torch.as_tensor(allowed) - fixed
    mask[..., SINKS : N - recent] = place < room.expand(rank.shape[:2])[..., None]
    return mask


def evicted(context: Context, mask: Tensor) -> Slots:
    """Plain eviction."""
    bias = torch.zeros(mask.shape).masked_fill(~mask, NONE)
    return Slots(context.full.keys, context.full.values, bias)


# -- merging ---------------------------------------------------------------------------------------


def rounded(slots: Slots, key_bits: int, value_bits: int) -> Slots:
    """The same with keys and values in fewer bits, rotated, one group a head."""

    def few(x: Tensor, bits: int) -> Tensor:
        levels = "uniform" if bits == 8 else "lloyd"
        return fake_quantize(x, Format(bits, x.shape[-1], levels, True)).to(x.dtype)

    return replace(slots, keys=few(slots.keys, key_bits), values=few(slots.values, value_bits))


@dataclass(frozen=True)
class Merge:
    """How evicted pairs are merged into their nearest kept neighbours of the same head.

    Attributes:
        weights: `count`: all alike; `d2o`: exponentials of similarities; `attention`: mean
            attention received.
        keys: whether keys are averaged too; otherwise the neighbour's stays.
        log: whether the logarithm of how many a slot stands for, or of the attention that they
            received over its own, is added to its logits.
        plain: whether neighbours are found, and keys averaged, before the rotation.
        values: whether values are averaged.
        above: whether only pairs go whose similarity is at least the mean of the head's.
    """

    weights: str = "count"
    keys: bool = False
    log: bool = True
    plain: bool = False
    values: bool = True
    above: bool = False


def merged(model: Plain, context: Context, mask: Tensor, how: Merge) -> Slots:
    """The slots of `mask` with what was evicted merged into them."""
    parts = [_layer(model, context, mask[i], i, how) for i in range(len(mask))]
    return Slots(*(torch.stack(x) for x in zip(*parts, strict=True)))


def _layer(
    model: Plain, context: Context, mask: Tensor, i: int, how: Merge
) -> tuple[Tensor, Tensor, Tensor]:
    base = context.plain[i] if how.plain else context.full.keys[i]
    unit, into = normalize(base, dim=-1), mask.clone()
    into[:, :SINKS] = False
    alike = (unit @ unit.mT).masked_fill(~into[:, None], NONE)
    near = alike.max(-1)
    likeness, target = near.values, near.indices
    goes, one = ~mask & into.any(-1, keepdim=True), torch.ones(mask.shape)
    own, weight = one, one
    if how.above:
        mean = torch.where(goes, likeness, 0).sum(-1) / goes.sum(-1).clamp_min(1)
        goes = goes & (likeness >= mean[:, None])
    if how.weights == "d2o":
        own, weight = one * torch.e, likeness.exp()
    if how.weights == "attention":
        own = weight = context.mean[i]
    weight = weight * goes
    sums = torch.zeros(mask.shape).scatter_add_(1, target, weight)
    many = torch.zeros(mask.shape).scatter_add_(1, target, goes.float())

    def mixed(x: Tensor) -> Tensor:
        added = torch.zeros_like(x).scatter_add_(
            1, target[..., None].expand_as(x), x * weight[..., None]
        )
        new = (x * own[..., None] + added) / (own + sums)[..., None]
        return torch.where(many[..., None] > 0, new, x)

    keys, values = context.full.keys[i], context.full.values[i]
    if how.keys:
        keys = mixed(base)
        keys = model.stored(turned(keys, *model.angles(0, context.size)) if how.plain else keys)
    values = model.stored(mixed(values)) if how.values else values
    bias = torch.zeros(mask.shape)
    if how.log:
        bias = (1 + (sums / own if how.weights == "attention" else many)).log()
    return keys, values, bias.masked_fill(~mask, NONE)


def cam(model: Plain, context: Context, mask: Tensor, seed: int) -> Slots:
    """CaM: a value is added in equal parts to the kept slots that follow, or not, by a draw.

    The probability is the attention that the slot received over the mean of these, at most 1.
    """
    draw, mean = torch.Generator().manual_seed(seed), context.mean
    values = context.full.values.clone()
    for i, h in np.ndindex(*mask.shape[:2]):
        stay = mask[i, h].nonzero()[:, 0]
        gone = (~mask[i, h]).nonzero()[:, 0]
        first = torch.searchsorted(stay, gone).clamp_max(len(stay) - 1)
        to = (first[:, None] + torch.arange(NEXT)).clamp_max(len(stay))
        there = to < len(stay)
        slot = stay[to.clamp_max(len(stay) - 1)]
        near = (mean[i, h][slot] * there).sum(1) / there.sum(1)
        chance = (mean[i, h][gone] / near).clamp(0, 1)
        part = torch.bernoulli(chance, generator=draw)[:, None] * there / there.sum(1)[:, None]
        added = part[..., None] * context.full.values[i, h][gone][:, None]
        values[i, h].index_add_(0, slot.flatten(), added.flatten(0, 1))
    return Slots(context.full.keys, model.stored(values), evicted(context, mask).bias)
