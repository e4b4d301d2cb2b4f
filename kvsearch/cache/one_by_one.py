"""`inplace` on a CPU where a compaction follows every token: one loop that numba compiles.

At interval 1 a token costs torch some 25 operations on a few hundred numbers. It decides as
`Victims` does; products and sums are rounded in another order.
"""

import torch
from torch import Tensor

from kvsearch.cache.victims import Victims
from kvsearch_kernels.numba_args import why_not_memory

SHARED = 1.3e6  # operations a token and layer that torch's threads would have to spare it


def serves(victims: Victims, q: Tensor) -> bool:
    """Whether the loop decides as `victims` does for queries `q` `[B, Hq, M, D]`, and is faster.

    It has one thread. With more, torch catches up where a token has many heads and slots.
    """
    rule, plain = victims.scorer.rule, q.dtype in (torch.float32, torch.float64)
    alone = victims.c == 1 and rule.pool == 1 and len(victims.sums) == 1
    work = 4 * q.shape[0] * q.shape[1] * q.shape[3] * victims.born.shape[-1]
    spared = work * (1 - 1 / torch.get_num_threads())
    return alone and plain and spared < SHARED and why_not_memory(q, victims.sums) is None


def run(
    slots: Tensor, victims: Victims, queries: Tensor, new: Tensor, kept: Tensor, weight: float,
    softcap: float | None,
) -> Tensor:  # fmt: skip
    """Take in tokens, see `inplace`.

    Args:
        slots: keys and values `[2, B, H, n + 1, D]`.
        victims: births and sums, which are written to.
        queries: scaled `[J, B * H, Hq / H, D]`.
        new: keys and values of the tokens `[J, 2, B, H, 1, D]`.
        kept: the same as their tier keeps them.
        weight: of a query row in the votes.
        softcap: bound of the products, if the model has one.

    Returns:
        Output `[J, B * H, Hq / H, D]`.
    """
    from kvsearch_kernels.numba_loops.one_by_one import one_by_one

    (J, heads, group, D), rule = queries.shape, victims.scorer.rule
    sums, born = (x.view(-1, x.shape[-1]) for x in (victims.sums, victims.born))
    out = torch.zeros_like(queries)
    decays = rule.kind == "decay" and rule.horizon is not None and not rule.literal
    horizon = 0 if rule.literal or rule.horizon is None else rule.horizon
    numbers = (
        victims.seen, *victims.candidates, victims.recent, int(victims.forgets_all),
        int(rule.beta != 0), horizon,
    )  # fmt: skip
    one_by_one(
        queries.numpy(), new.reshape(J, 2, heads, D).numpy(), kept.reshape(J, 2, heads, D).numpy(),
        slots.view(2, heads, -1, D).numpy(), sums.numpy(), born.numpy(), numbers,
        weight / (group * heads // len(sums)), victims.carry, rule.beta,
        1 - 1 / rule.horizon if decays and rule.horizon else 1.0, softcap or 0.0, out.numpy(),
    )  # fmt: skip
    victims.seen += J
    return out
