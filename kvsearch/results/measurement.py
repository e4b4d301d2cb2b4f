"""What the evaluation of a policy gives. Nothing heavy is imported here: drivers read it, too."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from kvsearch.policy.sequences import TextBytes
from kvsearch.results.intervals import clustered, wilson_by_group
from kvsearch.results.records import Interval, Kept


@dataclass(frozen=True)
class Anchored:
    """What anchors make of windows of text.

    Attributes:
        count: anchors in all of them.
        tokens: most tokens that the model is fed in one of them, inserted ones included.
        bytes: exact bytes per sequence: the most of any window, the mean over windows, and at the
            end of the last one.
    """

    count: int
    tokens: int
    bytes: TextBytes


@dataclass(frozen=True)
class Answered:
    """An item of prompts under a policy, or a window of a text beside some.

    Attributes:
        of: its workload.
        group: its document, which statistics count as independent.
        weight: of the workload.
        exact: whether greedy decoding gives each of the answers.
        first: most likely tokens of each, given the answer before.
        kl: divergences from the full cache of each, where they were measured.
        needle: length of the context, and depth in it of the fact that is asked for.
        nll: mean over its answers, or its scored tokens, in nats per token; None of older runs.
    """

    of: str
    group: str
    weight: float
    exact: list[bool]
    first: list[list[int]]
    kl: list[float] | None = None
    needle: tuple[int, float] | None = None
    nll: float | None = None


def kept(workload: str, lost: Interval, mine: Sequence[Answered], full: Sequence[Answered]) -> Kept:
    """What a policy keeps of a workload: of its answers, or of the windows of a text.

    Args:
        workload: its name.
        lost: share of the context that is lost.
        mine: items of the workload under the policy.
        full: the same items under the full cache.
    """
    exact = [x for a in mine for x in a.exact]
    if not exact:  # windows of a text
        losses = [np.array([a.nll for a in x], np.float64) for x in (mine, full)]
        dnll = clustered(losses[0] - losses[1], [a.group for a in mine])
        return Kept(workload, lost, ppl=math.exp(min(float(losses[0].mean()), 700.0)), dnll=dnll)
    groups = [a.group for a in mine for _ in a.exact]
    pairs = [
        (x, y)
        for a, b in zip(mine, full, strict=True)
        for said, whole in zip(a.first, b.first, strict=True)
        for x, y in zip(said, whole, strict=True)
    ]
    kl = [x for a in mine for x in a.kl or ()]
    return Kept(
        workload=workload,
        lost=lost,
        exact=wilson_by_group(exact, groups),
        flips=sum(x != y for x, y in pairs) / len(pairs),
        asks=len(exact),
        kl=sum(kl) / len(kl) if len(kl) == len(exact) else None,
    )


@dataclass(frozen=True, eq=False)
class Measurement:
    """One policy on windows of a text, or on items of prompts.

    Attributes:
        nll: nats per token `[W, T - 1]` fp32; entry t is the NLL of token t + 1. Of prompts
            `[items, 1]`, the mean NLL of an item's answers in shares of what the contexts of its
            workload are worth.
        tokens: that went through the model.
        bytes_resident: bytes per sequence held after the last token, summed over the real tensors
            of the packed cache; 0 where that was not asked for.
        seconds: wall time.
        impls: which implementation of each op ran.
        answers: of prompts, an entry for every item.
        anchored: anchors in the text and the bytes that follow; None of other policies. A run does
            not keep it.
    """

    nll: NDArray[np.float32]
    tokens: int = 0
    bytes_resident: int = 0
    seconds: float = 0.0
    impls: dict[str, str] = field(default_factory=dict)
    answers: tuple[Answered, ...] = ()
    anchored: Anchored | None = None

    @property
    def groups(self) -> tuple[str, ...]:
        """Of prompts, the document of every item."""
        return tuple(a.group for a in self.answers)

    @property
    def strata(self) -> tuple[str, ...]:
        """Of prompts of several workloads, the workload of every item.

        None where each document has items of every workload, as a text has in which facts are
        hidden: then documents are independent, whatever the workload.
        """
        of = tuple(a.of for a in self.answers)
        pairs = {*zip(of, self.groups, strict=True)}
        crossed = len(pairs) == len({*of}) * len({*self.groups}) == len(of)
        return () if len({*of}) <= 1 or crossed else of

    @classmethod
    def joined(cls, parts: Sequence["Measurement"]) -> "Measurement":
        """One policy on windows or items that follow on each other; bytes are of the first."""
        return cls(
            nll=np.concatenate([p.nll for p in parts]),
            tokens=sum(p.tokens for p in parts),
            bytes_resident=parts[0].bytes_resident,
            seconds=sum(p.seconds for p in parts),
            impls=parts[0].impls,
            answers=tuple(a for p in parts for a in p.answers),
        )

    def until(self, windows: int) -> "Measurement":
        """The same on the first windows or items; what is counted or timed remains that of all."""
        return replace(self, nll=self.nll[:windows], answers=self.answers[:windows])
