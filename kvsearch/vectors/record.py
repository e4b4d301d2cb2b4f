"""What the deployed cache does with a stream, token by token: written down while it happens."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvsearch.cache.head_group import HeadGroup
from kvsearch.cache.huggingface import PolicyCache, PolicyLayer
from kvsearch.cache.slots.formats import Held
from kvsearch.cache.slots.packed import PackedStore
from kvsearch.policy import Policy
from kvsearch.rules.base import pick


@dataclass(frozen=True)
class Compaction:
    """One compaction of one store, which holds KV heads of a layer that are alike.

    Attributes:
        seen: tokens of the stream before it.
        gone: tokens that left, for each voter.
        kept: tokens that stay, in order of time `[V, N]`.
        pools: pool of each `[V, N]`; the last pool is 16 bits.
        keys, values: what every pool holds then; None is nothing.
    """

    seen: int
    gone: tuple[tuple[int, ...], ...]
    kept: Tensor
    pools: Tensor
    keys: tuple[Held | None, ...]
    values: tuple[Held | None, ...]


class NotedStore(PackedStore):
    """A store that writes down what arrives and what leaves.

    Attributes:
        arrived: keys and values `[H, M, D]` of each call, in 16 bits.
        log: its compactions.
    """

    def __init__(self, group: HeadGroup) -> None:
        super().__init__(group.layout, group.native, group.impls)
        self.arrived: list[tuple[Tensor, Tensor]] = []
        self.log: list[Compaction] = []
        voters = 1 if group.rule is None else group.rule.voters(len(group.heads))
        self._tokens = torch.empty(voters, 0, dtype=torch.int64)
        self._seen = 0

    def append(self, k: Tensor, v: Tensor) -> None:
        """Note new tokens, and add them."""
        self.arrived.append((k[0].to(torch.float16), v[0].to(torch.float16)))
        new = torch.arange(self._seen, self._seen + k.shape[2])
        self._tokens = torch.cat([self._tokens, new.expand(len(self._tokens), -1)], -1)
        self._seen += k.shape[2]
        super().append(k, v)

    def compact(self, keep: Tensor | None, pools: Tensor) -> None:
        """Compact, and note what left and what is held."""
        super().compact(keep, pools)
        before = self._tokens
        if keep is not None:
            index = keep.reshape(-1, keep.shape[-1])
            self._tokens = pick(before, index.expand(len(before), -1))
        gone = tuple(
            tuple(sorted({*map(int, old)} - {*map(int, new)}))
            for old, new in zip(before, self._tokens, strict=True)
        )
        last = self.slot_pools()
        self.log.append(
            Compaction(
                self._seen,
                gone,
                self._tokens,
                last.reshape(-1, last.shape[-1]).expand(len(before), -1),
                tuple(self.keys), tuple(self.values),
            )
        )  # fmt: skip


class NotedLayer(PolicyLayer):
    """A layer that writes down its queries, unrotated where it turns them itself, and outputs.

    Attributes:
        queries, outputs: `[Hq, M, D]` of each call.
    """

    def __init__(self, layer: PolicyLayer) -> None:
        super().__init__(layer.held)
        self.queries: list[Tensor] = []
        self.outputs: list[Tensor] = []

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, softcap: float | None
    ) -> Tensor:
        """Note queries and outputs."""
        index = torch.arange(self.held.seen, self.held.seen + q.shape[2])
        rotary = self.held.rotary
        plain = rotary.undo(index, q)[0] if self.held.reindex and rotary is not None else q
        self.queries.append(plain[0])
        out = super().attend(q, k, v, scale=scale, softcap=softcap)
        self.outputs.append(out[0])
        return out


@dataclass(frozen=True)
class Record:
    """A stream under a policy.

    Attributes:
        logits: `[T, vocabulary]`.
        layers: queries and outputs by layer.
        groups: the heads of each store, shallow to deep.
        stores: the notes of each.
    """

    logits: Tensor
    layers: list[NotedLayer]
    groups: list[HeadGroup]
    stores: list[NotedStore] = field(default_factory=list)

    @property
    def decisions(self) -> list[list[tuple[tuple[int, ...], ...]]]:
        """Which tokens left, store by store and compaction by compaction."""
        return [[c.gone for c in store.log] for store in self.stores]

    @property
    def latest(self) -> list[tuple[tuple[int, ...], ...] | None]:
        """The last decision of each store."""
        return [store.log[-1].gone if store.log else None for store in self.stores]


def record(
    policy: Policy, models: Sequence[PreTrainedModel], ids: Tensor, prompt: int
) -> Record | None:
    """Feed the tokens `[T]`, the first `prompt` in one call and then one at a time.

    Args:
        policy: what the cache of each model does.
        models: the one that is recorded, and others that it is compared with.
        ids: the tokens.
        prompt: how many of them come first.

    Returns:
        The record; None as soon as other tokens leave in another model.
    """
    caches = [PolicyCache(policy, m, native=torch.float16, fast=False) for m in models]
    done = [_noted(cache) for cache in caches]
    logits, start = [], 0
    with torch.inference_mode():
        while start < len(ids):
            stop = start + (prompt if start == 0 else 1)
            x = ids[None, start:stop]
            got = [
                model(x, past_key_values=cache, use_cache=True).logits[0]
                for model, cache in zip(models, caches, strict=True)
            ]
            logits.append(got[0])
            if any(other.latest != done[0].latest for other in done[1:]):
                return None
            start = stop
    if any(other.decisions != done[0].decisions for other in done[1:]):
        return None
    return replace(done[0], logits=torch.cat(logits))


def _noted(cache: PolicyCache) -> Record:
    """A record of nothing yet, into which everything goes that `cache` is given."""
    stores = []
    for group in cache.groups:
        group.store = NotedStore(group)
        stores.append(group.store)
    layers = [NotedLayer(layer) for layer in cache.layers if isinstance(layer, PolicyLayer)]
    cache.layers[:] = layers
    return Record(torch.empty(0), layers, cache.groups, stores)
