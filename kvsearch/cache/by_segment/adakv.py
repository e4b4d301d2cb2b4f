"""Heads that share slots anew at every compaction (AdaKV, arXiv:2407.11550).

The best-ranked slots of all heads together are counted by head: a head gets as many as it has among
them, mixed with an even share so that none is starved. The total never changes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvsearch.cache.head_group import HeadGroup
from kvsearch.cache.layer import Layer


def shares(layers: Sequence[Layer], seen: int) -> dict[HeadGroup, tuple[Tensor, int]]:
    """Ranks of the slots of every head, and how many each keeps; nothing where all may stay.

    How many they are is for the host to know, which makes tensors of so many: it waits for the
    device.

    Args:
        layers: whose heads share slots, each head a group of its own.
        seen: tokens of the stream.
    """
    groups = [group for layer in layers for group in layer.groups]
    policy = layers[0].policy
    assert policy.slots is not None
    target = policy.slots - policy.interval
    room = [group.store.n for group in groups]
    if len(groups) == 1 or sum(room) <= target * len(groups):
        return {}
    ranks = [x for group in groups if (x := group.ranks(seen)) is not None]
    first, recent = policy.sinks, policy.recent_window
    chosen = [x[0, 0, first : x.shape[-1] - recent] for x in ranks]
    every = torch.cat([x.to(chosen[0].device) for x in chosen])
    even = target - first - recent
    best = every.topk(even * len(groups), sorted=False).indices
    among = best.new_zeros(len(every)).index_fill_(0, best, 1)
    room = [n - first - recent for n in room]
    counts = torch.stack([head.sum() for head in among.split(room)]).to("cpu").tolist()
    kept = split(counts, even, room, policy.budgets.floor)
    return {group: (x, first + recent + n) for group, x, n in zip(groups, ranks, kept, strict=True)}


def split(counts: Sequence[int], even: int, room: Sequence[int], floor: float) -> list[int]:
    """Evictable slots that each head keeps; they add up to `even` for every head.

    Args:
        counts: of the layer's best-ranked slots, how many each head has.
        even: slots of an even split.
        room: slots that each head has.
        floor: share of an even split that every head gets.
    """
    exact = [floor * even + (1 - floor) * n for n in counts]
    got = [min(int(x), most) for x, most in zip(exact, room, strict=True)]
    order = sorted(range(len(got)), key=lambda h: got[h] - exact[h])
    missing = even * len(got) - sum(got)
    while missing:  # what rounding, or a head with no more slots, has left over
        for h in order:
            if missing and got[h] < room[h]:
                got[h] += 1
                missing -= 1
    return got
