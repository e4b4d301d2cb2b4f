"""What a server is told a request takes: blocks, from a policy's bytes.

A server counts memory in blocks of equal size. A block here is what `per_block` held tokens take
under the policy. A request needs as many as its largest number of bytes so far fills, so one that
evicts stops asking when it is full.
"""

from bisect import bisect_left
from dataclasses import dataclass

from kvsearch.policy import ModelShape, Policy, layout

MOST = 1024  # blocks of one request: a server handles lists of them


@dataclass(frozen=True)
class Account:
    """Blocks of one request.

    Attributes:
        page: bytes of a block in each layer.
        reach: most tokens that 1, 2, ... blocks hold; the last is the longest request.
    """

    page: int
    reach: tuple[int, ...]

    def blocks(self, tokens: int) -> int:
        """Blocks that a request of so many tokens has needed at most so far."""
        return min(bisect_left(self.reach, tokens), len(self.reach) - 1) + 1 if tokens else 0

    @property
    def most(self) -> int:
        """Blocks of the longest request."""
        return len(self.reach)


def account(policy: Policy, shape: ModelShape, longest: int, per_block: int) -> Account:
    """How requests of up to `longest` tokens are counted.

    Args:
        policy: what a request holds; compactions follow the stream, not a prompt.
        shape: of the model.
        longest: tokens of a request, at most.
        per_block: held tokens whose bytes make a block.
    """
    bytes_peak = layout(policy, shape).bytes_peak
    held = longest if policy.slots is None else min(longest, policy.slots)
    most = min(MOST, -(-held // per_block))
    page = -(-bytes_peak(longest) // (most * shape.layers))
    reach: list[int] = []
    while not reach or reach[-1] < longest:
        room = (len(reach) + 1) * page * shape.layers
        least = reach[-1] if reach else 0
        fits = range(least + 1, longest + 1)
        reach.append(least + bisect_left(fits, True, key=lambda n: bytes_peak(n) > room))
    return Account(page, tuple(reach))
