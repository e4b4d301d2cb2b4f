"""Paired differences of per-token NLL with intervals from long blocks.

Neighbouring tokens are correlated, and what a policy loses changes with the passage: passages of a
thousand tokens differ by more than the scatter within them would give. So intervals count blocks
of about 1024 tokens, or whole windows where those are shorter, as independent, and nothing below.
There are few of them; the limits are quantiles of Student's t. Where many policies were measured
on the same text, each interval takes in what their differences say together of the variance of
one of them (`Spread`). `studies/2026-11-coverage` has how often such intervals hold on other
windows of the text. Of prompts, documents count as independent: neither the contexts of one, nor
the asks of a context.

All of it follows from the sums over blocks, so every function takes losses per token or as
`Blocks`, with the same result for 256 tokens or more.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import hypot
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsearch.results.records import Interval
from kvsearch.results.student_t import quantile

Array = NDArray[np.floating[Any]]
BLOCK = 64  # tokens; losses of kept runs are sums over so many
LONG = 1024  # tokens of a block that counts as independent of its neighbours, about
LEAST = 4  # such blocks; on less text than that they are shorter
PRIOR = 3  # degrees of freedom that the differences of a run have together in the variance of each
NEAR = 0.003  # nats: differences below that are as noisy as one of that size


@dataclass(frozen=True)
class Blocks:
    """Losses as sums over blocks of consecutive tokens; no block spans two windows.

    Args:
        sums: `[windows, blocks]` float64, nats.
        tokens: `[blocks]` tokens of each block, the same in every window; the last may have fewer.
        groups: the document of each window, of those that have one: then documents count as
            independent, and neither their windows nor blocks do.
        strata: the workload of each window, where they take turns: differences between workloads
            are no uncertainty of their mean, and the workload with the fewest documents says how
            wide an interval is for its standard error.
    """

    sums: NDArray[np.float64]
    tokens: NDArray[np.int64]
    groups: tuple[str, ...] = ()
    strata: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Tokens in all windows together."""
        return len(self.sums) * int(self.tokens.sum())

    @property
    def count(self) -> int:
        """What counts as independent: documents, or blocks in all windows together."""
        if self.strata:
            pairs = {*zip(self.strata, self.groups, strict=True)}
            return min(Counter(stratum for stratum, _ in pairs).values())
        return len({*self.groups}) if self.groups else int(self.sums.size)

    def mean(self) -> float:
        """Mean loss in nats per token."""
        return float(self.sums.sum() / self.size)

    def first(self, windows: int | None) -> "Blocks":
        """The first windows; all with None."""
        return self.at(slice(0, windows))

    def at(self, windows: slice | list[int]) -> "Blocks":
        """Some windows."""
        if isinstance(windows, slice):
            windows = list(range(len(self.sums)))[windows]
        groups, strata = (
            tuple(x[i] for i in windows) if x else x for x in (self.groups, self.strata)
        )
        return Blocks(self.sums[windows], self.tokens, groups, strata)

    def less(self, other: "Blocks") -> "Blocks":
        """Differences on the same windows and tokens.

        Raises:
            ValueError: the other has other ones.
        """
        if self.sums.shape != other.sums.shape or (self.tokens != other.tokens).any():
            shapes = f"{self.sums.shape} and {other.sums.shape} blocks"
            raise ValueError(f"paired differences need the same windows and tokens, got {shapes}")
        return replace(self, sums=self.sums - other.sums)


Losses = Array | Blocks


def blocks(
    x: Losses, block: int = BLOCK, groups: Sequence[str] = (), strata: Sequence[str] = ()
) -> Blocks:
    """Losses in blocks of `block` tokens.

    Args:
        x: losses per token `[windows, tokens]`, or in blocks of which `block` is a multiple.
        block: tokens.
        groups, strata: the document and the workload of each window, of losses per token.

    Raises:
        ValueError: `x` is in blocks that do not fit into these.
    """
    if not isinstance(x, Blocks):
        each = np.atleast_2d(x).astype(np.float64)
        ones = np.ones(each.shape[1], dtype=np.int64)
        per_token = Blocks(each, ones, tuple(groups), tuple(strata))
        return _merged(per_token, np.arange(0, each.shape[1], block))
    have = int(x.tokens[0])
    if block < have or (block % have and len(x.tokens) > 1):
        raise ValueError(f"losses in blocks of {have} tokens cannot be put into {block}")
    return _merged(x, np.arange(0, len(x.tokens), block // have))


def long_blocks(x: Losses) -> Blocks:
    """Losses in the blocks that intervals rest on: equal parts of a window of about 1024 tokens.

    A window of fewer than 1536 scored tokens is one block. If there are fewer than `LEAST` blocks
    in all windows together, they are shorter, so that there are so many.
    """
    fine = _fine(x)
    windows, tokens = len(fine.sums), int(fine.tokens.sum())
    parts = max(round(tokens / LONG), -(-LEAST // windows), 1)
    parts = min(parts, len(fine.tokens))
    if parts == len(fine.tokens):
        return fine
    each, longer = divmod(len(fine.tokens), parts)  # the first parts have one more
    part = np.arange(parts)
    return _merged(fine, part * each + np.minimum(part, longer))


@dataclass(frozen=True)
class Spread:
    """What the differences of a run say together of the variance of one: a moderated t statistic.

    Variance per token is a line in the size of the difference, both as logarithms; a variance that
    was found on few blocks is drawn to that line (Smyth 2004, doi:10.2202/1544-6115.1027). The line
    counts as `PRIOR` degrees of freedom, whatever its fit: rows share their windows, so that
    estimates of that number run away. One degree is taken off for the line's own error.

    Attributes:
        level: logarithm of the variance of a token's difference of one nat, in nats squared.
        slope: of that logarithm in the logarithm of the difference.
    """

    level: float
    slope: float

    def moderated(self, mean: float, error: float, blocks: int, tokens: int) -> tuple[float, int]:
        """Standard error and degrees of freedom, from those of `blocks` blocks with `tokens`."""
        line = np.exp(self.level + self.slope * np.log(abs(mean) + NEAR)) / tokens
        df = blocks - 1
        return float(np.sqrt((PRIOR * line + df * error**2) / (PRIOR + df))), df + PRIOR - 1


def spread(differences: Iterable[Sequence[Losses]]) -> Spread | None:
    """The line of variance over size; None for fewer than four differences, which are too few.

    Args:
        differences: each in parts as `interval` takes them.
    """
    sizes, variances = [], []
    for parts in differences:
        mean, error, n, tokens = _summed(parts)
        if n > 1 and error > 0:
            df = n - 1
            sizes.append(np.log(abs(mean) + NEAR))  # of a chi square the mean logarithm is lower:
            variances.append(np.log(error**2 * tokens) + 1 / df + 1 / (3 * df * df))
    if len(sizes) < 4:
        return None
    x = np.stack([np.ones(len(sizes)), np.array(sizes)], 1)
    (level, slope), *_ = np.linalg.lstsq(x, np.array(variances))
    return Spread(float(level), float(slope))


def interval(*parts: Losses, level: float = 0.95, spread: Spread | None = None) -> Interval:
    """Mean of losses with a two-sided interval from long blocks; no limits for a single block.

    Of several parts, which have no window in common (`through`), it is the sum of their means, and
    the part with the fewest blocks says how wide the interval is for its standard error.

    Args:
        parts: losses, on windows of their own each.
        level: how often the interval holds.
        spread: of all differences of the run, which makes it narrower where there are few blocks.
    """
    mean, error, n, tokens = _summed(parts)
    if n < 2:
        return Interval(mean, float("nan"), float("nan"))
    df = n - 1
    if spread is not None and error > 0:
        error, df = spread.moderated(mean, error, n, tokens)
    half = quantile((1 + level) / 2, df) * error
    return Interval(mean, mean - half, mean + half)


def _summed(parts: Sequence[Losses]) -> tuple[float, float, int, int]:
    """Sum of the means, its standard error, and blocks and tokens of the part with the fewest."""
    found = [long_blocks(x) for x in parts]
    least = min(found, key=lambda x: x.count)
    error = hypot(*(_standard_error(x) for x in found))
    return sum(x.mean() for x in found), error, least.count, least.size


def corrected(rows: int, level: float = 0.95) -> float:
    """The level of one interval so that `rows` of them all hold at once at `level` (Bonferroni)."""
    return 1 - (1 - level) / max(1, rows)


def paired(a: Losses, b: Losses, *, level: float = 0.95, spread: Spread | None = None) -> Interval:
    """Interval of the mean of `a - b` on the same tokens; below 0 says that `a` is better."""
    return interval(_fine(a).less(_fine(b)), level=level, spread=spread)


def common(a: Blocks, b: Blocks) -> tuple[Blocks, Blocks]:
    """Both on the first windows that both have."""
    windows = min(len(a.sums), len(b.sums))
    return a.first(windows), b.first(windows)


def through(a: Blocks, middle: Blocks, b: Blocks | None = None) -> tuple[Blocks, ...]:
    """`a - b` on all windows of `middle`, though `a` may have the first of them only.

    It is `a - middle` on the windows that both have, plus `middle - b` on all: of two rows that are
    compared through the same third one, neither is ahead because its windows are easier.

    Args:
        a: losses on the first windows.
        middle: losses on all windows.
        b: losses on as many as `middle`; None: `a` itself is asked for.

    Returns:
        Parts on different windows, for `interval`; the sum of their means is the answer. There is
        one part where `a` has all windows.
    """
    middle, b = common(middle, b or replace(middle, sums=np.zeros_like(middle.sums)))
    a, its = common(a, middle)
    have, windows = len(a.sums), len(middle.sums)
    if have == windows:
        return (a.less(b),)
    gap, share = middle.sums - b.sums, have / windows
    both = replace(a, sums=a.sums - its.sums + share * gap[:have])
    return both, replace(middle, sums=(1 - share) * gap).at(slice(have, None))


def spread_of(rows: Iterable[Blocks], middle: Blocks, full: Blocks) -> Spread | None:
    """The spread of a run: of every row's differences to its `middle` row and to the full cache."""
    kept = list(rows)
    return spread(
        d for x in kept for d in (through(x, middle), through(x, middle, full)) if x is not full
    )


def standard_error(x: Losses, block: int | None = None) -> float:
    """Standard error of the mean of `x` over blocks of `block` tokens; long blocks by default."""
    return _standard_error(long_blocks(x) if block is None else blocks(x, block))


def _standard_error(x: Blocks) -> float:
    if x.count < 2:
        return float("nan")
    total = 0.0
    for stratum in dict.fromkeys(x.strata) or [""]:
        mine = [i for i, s in enumerate(x.strata) if s == stratum]
        some = x.at(mine) if x.strata else x
        residual = some.sums - some.mean() * some.tokens
        if some.groups:
            residual = _by_group(residual.sum(1), some.groups)
        n = residual.size
        total += n / (n - 1) * float((residual**2).sum())
    return float(np.sqrt(total) / x.size)


def _by_group(values: Array, groups: Sequence[str]) -> NDArray[np.float64]:
    """Sums of values over the members of each group."""
    _, at = np.unique(np.asarray(groups), return_inverse=True)
    return np.bincount(at, weights=values).astype(np.float64)


def _fine(x: Losses) -> Blocks:
    """Losses in blocks as short as they are stored, or shorter on a very short text."""
    return x if isinstance(x, Blocks) else blocks(x, max(1, min(BLOCK, np.size(x) // LEAST)))


def _merged(x: Blocks, starts: NDArray[np.int64]) -> Blocks:
    """Blocks joined; each of the new ones begins with the block at one of `starts`."""
    sums, tokens = np.add.reduceat(x.sums, starts, axis=1), np.add.reduceat(x.tokens, starts)
    return replace(x, sums=sums, tokens=tokens)


def clustered(values: Array, groups: Sequence[str], level: float = 0.95) -> Interval:
    """Mean of values with an interval in which groups count as independent, not their members.

    Args:
        values: one for each ask `[N]`.
        groups: the document of each.
        level: of the two-sided interval; Student's t with a degree of freedom less than groups.
    """
    return interval(blocks(values[:, None], groups=groups), level=level)


def wilson(successes: int, n: int) -> Interval:
    """A share with its 95 % interval by Wilson (1927), which holds near 0 and 1 as well."""
    return _wilson(successes / n, n)


def wilson_by_group(hits: Sequence[bool], groups: Sequence[str]) -> Interval:
    """A share with its 95 % interval, in which groups count as independent, not their members.

    It is Wilson's interval of as many independent asks as have the variance of these (Rao and Scott
    1992, doi:10.2307/2532311). If all hits are alike, that is the number of groups; if every ask is
    a group, that of asks.

    Args:
        hits: of each ask.
        groups: the document of each.
    """
    asks, known = len(hits), len({*groups})
    share, independent = sum(hits) / asks, float(known)
    if known > 1 and 0 < share < 1:
        sums = _by_group(np.asarray(hits, float) - share, groups)
        variance = known / (known - 1) * float((sums**2).sum())
        if_alone = asks / (asks - 1) * asks * share * (1 - share)
        independent = asks * if_alone / max(variance, if_alone)
    return _wilson(share, independent)


def _wilson(share: float, n: float) -> Interval:
    z = 1.959964
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * float(np.sqrt(share * (1 - share) / n + z * z / (4 * n * n)))
    return Interval(share, max(0.0, middle - half), min(1.0, middle + half))


def mcnemar(gaps: Sequence[int]) -> float:
    """McNemar's exact test by document, two-sided: are sums as large likely of equal policies?

    If two policies are as good, each document's difference is as likely to have the other sign.
    With an ask a document it is McNemar's test.

    Args:
        gaps: of each document: asks that one of two policies answers and the other does not, less
            those that only the other answers.
    """
    ways = {0: 1}  # of every sum: how many choices of signs give it
    for gap in filter(None, gaps):
        more = Counter[int]()
        for total, count in ways.items():
            more[total + gap] += count
            more[total - gap] += count
        ways = dict(more)
    found = abs(sum(gaps))
    return sum(n for total, n in ways.items() if abs(total) >= found) / sum(ways.values())
