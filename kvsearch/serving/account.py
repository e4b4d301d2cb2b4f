"""What a server is told a request takes: blocks, from a policy's bytes.

A server counts memory in blocks of equal size. A block here is what `per_block` held tokens take
under the policy. A request needs as many as its largest number of bytes so far fills, so one that
evicts stops asking when it is full.

A policy that compacts after the prompt holds the prompt in 16 bits until its last piece has come,
and gives blocks back then. A prompt that comes whole never takes more than what is left of it.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field

from kvsearch.policy import Layout, ModelShape, Policy, layout

MOST = 1024  # blocks of one request: a server handles lists of them


@dataclass(frozen=True)
class Account:
    """Blocks of one request.

    Attributes:
        page: bytes of a block in each layer.
        reach: most tokens that 1, 2, ... blocks hold, of a prompt that has not come whole where the
            policy waits for that; the last is the longest request.
        step: tokens after a prompt that are counted together.
        after: what is held once the prompt has come; None: the policy does not wait for it.
    """

    page: int
    reach: tuple[int, ...]
    step: int = 1
    after: Layout | None = field(default=None, compare=False, repr=False)
    _known: dict[tuple[int, int], int] = field(default_factory=dict, compare=False, repr=False)

    def blocks(self, tokens: int, prompt: int = 0) -> int:
        """Blocks that a request of so many tokens has needed at most so far.

        Args:
            tokens: of the request.
            prompt: of its prompt. Once that has come, what it took before does not count.
        """
        if not tokens:
            return 0
        if self.after is None or tokens < prompt:
            return min(bisect_left(self.reach, tokens), len(self.reach) - 1) + 1
        found = prompt + -(-(tokens - prompt) // self.step) * self.step
        if (prompt, found) not in self._known:
            if len(self._known) > 1 << 16:
                self._known.clear()
            peak = self.after.bytes_peak(found, prompt)
            self._known[prompt, found] = -(-peak // (self.page * self.after.whole.layers))
        return self._known[prompt, found]

    @property
    def most(self) -> int:
        """Blocks of the longest request."""
        return len(self.reach)

    @property
    def entries(self) -> int:
        """Entries of a request's row of blocks, at most."""
        return self.most if self.after is None else 2 * self.most + 2


@dataclass
class Row:
    """Which entries of a request's row of blocks are its own: a scheduler and a worker agree on it.

    A row only grows. What a request gives back after its prompt stays in it as a gap.

    Attributes:
        account: counts it.
        prompt: tokens of its prompt.
        length: entries so far.
        gap: those that it gives back once the call that brought the end of its prompt has run.
        whole: whether that call has been counted.
    """

    account: Account
    prompt: int = 0
    length: int = 0
    gap: range = range(0)
    whole: bool = False

    def lacks(self, tokens: int) -> int:
        """Blocks that it needs beside its own for so many tokens."""
        own = self.length - len(self.gap)
        return max(0, self.account.blocks(tokens, self.prompt) - own)

    def grow(self, tokens: int) -> range:
        """Entries that so many tokens add to it."""
        new = range(self.length, self.length + self.lacks(tokens))
        self.length = new.stop
        if not self.whole and tokens >= self.prompt:
            self.whole = True
            self.gap = range(self.account.blocks(tokens, self.prompt), self.length)
        return new


def account(policy: Policy, shape: ModelShape, longest: int, per_block: int) -> Account:
    """How requests of up to `longest` tokens are counted.

    Args:
        policy: what a request holds.
        shape: of the model.
        longest: tokens of a request, at most.
        per_block: held tokens whose bytes make a block.
    """
    sizes = layout(policy, shape)
    held = longest if policy.slots is None else min(longest, policy.slots)
    if not waits(policy):
        return _counted(sizes.bytes_peak, shape, longest, -(-held // per_block))
    if policy.trigger == "generation":
        held = longest
    prompts = {1, longest // 2 + 1, longest}
    peak = max(waiting(sizes, longest), *(sizes.bytes_peak(longest, n) for n in prompts))
    most = -(-peak * held // (sizes.bytes_at(longest, longest) * per_block))
    found = _counted(lambda n: peak if n == longest else waiting(sizes, n), shape, longest, most)
    return Account(found.page, found.reach, -(-per_block // 8), sizes)


def waits(policy: Policy) -> bool:
    """Whether what a request holds depends on where its prompt ends."""
    return policy.after_prompt and policy.compacts


def waiting(sizes: Layout, tokens: int) -> int:
    """Bytes of so many tokens of a prompt that has not come whole: all of them, in 16 bits."""
    return sum(count * layer.bytes(0, tokens) for layer, count in sizes.distinct)


def _counted(
    bytes_peak: Callable[[int], int], shape: ModelShape, longest: int, most: int
) -> Account:
    most = min(MOST, most)
    page = -(-bytes_peak(longest) // (most * shape.layers))
    reach: list[int] = []
    while not reach or reach[-1] < longest:
        room = (len(reach) + 1) * page * shape.layers
        least = reach[-1] if reach else 0
        fits = range(least + 1, longest + 1)
        reach.append(least + bisect_left(fits, True, key=lambda n: bytes_peak(n) > room))
    return Account(page, tuple(reach))
