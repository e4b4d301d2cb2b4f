"""What a run leaves behind, as values: trials, measured rows and the summary that reports draw."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from pydantic import Field

from kvsearch.policy import Policy

State = Literal["running", "complete", "rejected", "duplicate", "failed", "pruned"]
Kind = Literal["full", "method", "combined", "earlier", "searched"]


@dataclass(frozen=True)
class Interval:
    """A mean with its 95 % interval; in a report, corrected for the number of rows."""

    mean: float
    lo: float
    hi: float

    @property
    def undecided(self) -> bool:
        """Whether 0 is inside; also where there are no limits."""
        return not (self.lo > 0 or self.hi < 0)

    def __str__(self) -> str:
        if not math.isfinite(self.lo) or not math.isfinite(self.hi):  # a single block has none
            return f"{self.mean:+z.4f} [no interval]"
        return f"{self.mean:+z.4f} [{self.lo:+z.4f}, {self.hi:+z.4f}]"  # z: no -0.0000


@dataclass(frozen=True)
class Throughput:
    """Decode speed from interleaved pairs with the full cache: medians and quartiles.

    Attributes:
        tokens_per_s: of the policy's deployed cache.
        full_tokens_per_s: of the full cache in the same pairs.
        ratio: median over pairs of policy / full; above 1 is faster.
        ratio_lo, ratio_hi: quartiles of the ratio over pairs.
        pairs: how many pairs.
        context: tokens in the cache when decoding started.
        device: where it was measured.
        bytes_resident: bytes the policy's cache held at the end.
        full_bytes: bytes the full cache held at the end.
        replayed, full_replayed: share of the timed tokens that were replays of a CUDA graph; None
            where that was not asked for.
    """

    tokens_per_s: float
    full_tokens_per_s: float
    ratio: float
    ratio_lo: float
    ratio_hi: float
    pairs: int
    context: int
    device: str
    bytes_resident: int
    full_bytes: int
    replayed: float | None = None
    full_replayed: float | None = None


@dataclass(frozen=True)
class Trial:
    """One proposal of the search.

    Attributes:
        number: Optuna's trial number; below 0 for methods that the space does not contain.
        name: the method's name for enqueued ones, `trial N` otherwise.
        kind: where the policy came from.
        state: `running` when an evaluator has it, then how it ended; `duplicate` is a policy seen
            before, and `pruned` one that an older version stopped early.
        nll: mean NLL on the search text, nats per token.
        dnll: mean difference to the full cache on the same tokens.
        bytes_peak: bytes per sequence, exact.
        speed: modelled decode tokens/s over those of the full cache, if speed is an objective.
        seconds: wall time of the evaluation.
        error: why it failed, was rejected or was stopped.
        params: values of the space's active axes.
        windows: of the search text that it was measured on, from the first.
        tokens: tokens that went through the model for it.
        attempt: 1, or more after its evaluator or the driver was killed.
        system: notes of the sampler (Optuna's system attributes).
    """

    number: int
    name: str
    kind: Kind
    state: State
    policy: Policy
    fingerprint: str
    nll: float | None = None
    dnll: float | None = None
    bytes_peak: int | None = None
    speed: float | None = None
    seconds: float | None = None
    error: str | None = None
    params: dict[str, Any] = field(default_factory=dict)
    windows: int = 0
    tokens: int = 0
    attempt: int = 1
    system: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def full(cls, layers: int) -> "Trial":
        """The full cache beside the trials, of a model with so many layers."""
        policy = Policy(name="full")
        return cls(-1, "full", "full", "complete", policy, policy.fingerprint(layers))


@dataclass(frozen=True)
class Kept:
    """What a policy keeps of one workload.

    Attributes:
        workload: name of the task or file; `text` is windows of one.
        lost: share of the context that it loses: 0 is the full cache, 1 is no context. Of a text,
            no context is its last few tokens.
        exact: share of answers that greedy decoding gives, with its Wilson interval.
        flips: share of answer tokens whose most likely token is not the full cache's.
        asks: answers.
        kl: mean KL divergence of the next-token distributions from the full cache's at the answers'
            tokens, in nats; None where it was not measured.
        ppl: of a text, perplexity of its scored tokens.
        dnll: of a text, NLL minus that of the full cache, nats per token.
    """

    workload: str
    lost: Interval
    exact: Interval | None = None
    flips: float | None = None
    asks: int = 0
    kl: float | None = None
    ppl: float | None = None
    dnll: Interval | None = None


@dataclass(frozen=True)
class Needle:
    """Whether a fact that was hidden in a context was found.

    Attributes:
        workload: name of the task.
        length: tokens of the context.
        depth: of the fact in it, from 0 to 1.
        exact: whether greedy decoding gives the answer.
    """

    workload: str
    length: int
    depth: float
    exact: bool


@dataclass(frozen=True)
class Discordant:
    """Answers of which a row and the recommended policy give one and not the other.

    Attributes:
        only_row, only_recommended: how many each gives alone, on contexts that both have.
        p: of McNemar's exact test, two-sided, that both give as many.
    """

    only_row: int
    only_recommended: int
    p: float


@dataclass(frozen=True, kw_only=True)
class MeasuredPolicy:
    """A policy on the report text: what is kept of it, its losses aside.

    Attributes:
        name: unique label.
        bytes_resident: sum over the real tensors after the last token of a window; None where the
            cache was not packed, as on the search text.
        impls: which implementation of each op ran.
        decode: measured decode speed, if it was.
        stopped: how far behind the recommended policy it was, on the windows of search and report
            text that both had, when it got no further windows.
        speed: modelled decode tokens/s over the full cache's, if speed was an objective.
    """

    name: str
    kind: Kind
    policy: Policy
    fingerprint: Annotated[str, Field(pattern="^[0-9a-f]{1,64}$")]
    bytes_resident: int | None = None
    seconds: float
    impls: dict[str, str] = field(default_factory=dict)
    decode: Throughput | None = None
    stopped: Interval | None = None
    speed: float | None = None


@dataclass(frozen=True, kw_only=True)
class Row(MeasuredPolicy):
    """The same with its figures. Differences are paired per token, in nats per token.

    Attributes:
        tokens: scored tokens that it was measured on.
        nll, nll_se: mean NLL and its standard error over `blocks` long blocks. Of a row with fewer
            windows than the recommended one, `nll`, `ppl` and `dnll_full` are those of that one on
            all its windows, plus the difference between the two on the windows that both have.
        blocks: that count as independent; the row's intervals rest on them.
        ppl: exp(nll).
        dnll_full: minus the full cache; above 0 is worse.
        dnll_best: minus `best` (None: there is none).
        best: the best published method within the budget, or within this row's bytes if more.
        search_dnll: the same difference to the full cache on the search text, if it was searched.
        bytes_peak, bytes_mean: exact, from the policy.
        slots16: `bytes_peak` in fp16 slots per layer, the unit of `--budget`.
        on_front: no other row has both lower NLL and no more bytes.
        within_budget: whether bytes_peak is at most the budget.
        windows: of the report text that it was measured on.
        exact: of prompts, the share of answers that greedy decoding gives, with its Wilson
            interval. Losses are shares of the context then, and a context counts as a token and
            as a window.
        workloads: of prompts, the same by workload.
        discordant: of prompts, exact answers against those of the recommended policy.
        needles: of tasks that ask for one fact in a context.
    """

    tokens: int
    nll: float
    nll_se: float
    blocks: int
    ppl: float
    dnll_full: Interval
    dnll_best: Interval | None
    best: str | None
    search_dnll: float | None
    bytes_peak: int
    bytes_mean: float
    slots16: float
    on_front: bool
    within_budget: bool
    windows: int = 0
    exact: Interval | None = None
    workloads: tuple[Kept, ...] = ()
    discordant: Discordant | None = None
    needles: tuple[Needle, ...] = ()

    @property
    def text(self) -> Kept | None:
        """What is kept of windows of a text, where these are one workload among others."""
        return next((k for k in self.workloads if k.dnll is not None), None)

    @property
    def asked(self) -> tuple[Kept, ...]:
        """What is kept of workloads that ask."""
        return tuple(k for k in self.workloads if k.exact is not None)


REPORT = "report text"  # the text of a recheck that is no further one


@dataclass(frozen=True)
class Example:
    """A prompt of the report and what greedy decoding says to it.

    Attributes:
        workload: name of the task or file.
        question: the end of the question.
        reference: the answer that is scored.
        answers: by policy; the full cache is the first.
    """

    workload: str
    question: str
    reference: str
    answers: dict[str, str]


@dataclass(frozen=True)
class Curve:
    """A policy at several sizes, smallest first, all of them on the first window or few.

    Attributes:
        name: of the row.
        points: peak bytes per sequence, and the loss over the full cache.
    """

    name: str
    points: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Recheck:
    """The recommended policy against its baselines on a second text, or between two rows.

    Attributes:
        text: which text: `REPORT`, or the label of a further one.
        policy: name of the policy.
        against: name of the baseline.
        dnll: policy minus baseline, paired.
        tokens: scored tokens.
    """

    text: str
    policy: str
    against: str
    dnll: Interval
    tokens: int


@dataclass(frozen=True)
class Limits:
    """What the recommended policy may lose.

    Attributes:
        max_drop: per cent of perplexity on a text, and of what the context is worth on prompts.
        max_kld: KL divergence from the full cache on answers, nats a token, or None.
    """

    max_drop: float = 5.0
    max_kld: float | None = None


def plain(value: Any) -> Any:
    """A record as JSON-ready data; policies become their active fields."""
    if isinstance(value, Policy):
        return value.plain()
    if hasattr(value, "__dataclass_fields__"):
        return {k: plain(getattr(value, k)) for k in value.__dataclass_fields__}
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value


def columns(kind: type, records: Sequence[Any]) -> dict[str, list[Any]]:
    """Records as columns: every field of the dataclass `kind`, in its order, none left out.

    An `Interval` becomes three columns, the last two with `_lo` and `_hi`. Policies, mappings and
    sequences become JSON.
    """
    out: dict[str, list[Any]] = {}
    for f in fields(kind):
        values = [getattr(r, f.name) for r in records]
        if f.type in (Interval, Interval | None):
            for suffix, part in (("", "mean"), ("_lo", "lo"), ("_hi", "hi")):
                out[f.name + suffix] = [None if v is None else getattr(v, part) for v in values]
        else:
            simple = str | int | float | None
            out[f.name] = [v if isinstance(v, simple) else json.dumps(plain(v)) for v in values]
    return out
