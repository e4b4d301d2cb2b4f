"""What an evaluation measured: a row for each policy on each workload."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from kvsearch.errors import RunError
from kvsearch.files import write_parquet
from kvsearch.results.records import Interval, columns, plain
from kvsearch.workloads.items import See

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """One policy on one workload. NLL in nats per token, bytes per sequence.

    Attributes:
        policy: its name.
        fingerprint: identity of the policy on this model.
        workload: `text`, or the name of the task or file.
        nll: mean NLL: of a text over its scored tokens, of prompts over answers.
        dnll_full: minus the full cache on the same tokens; above 0 is worse.
        bytes_peak, bytes_mean, bytes_asked: exact, from the policy: largest, mean, and at the end
            of a window, or of the longest item.
        bytes_peak_text: the largest total on these windows. Where the policy has anchors the text
            decides it, and `bytes_mean` and `bytes_resident`; `bytes_peak` and `bytes_asked` are
            then the same ceiling, which no text exceeds at any step.
        bytes_resident: summed over the real tensors at the end of a window, or of the longest item.
        bytes_prompt: of prompts, the same after the prompt.
        slots16: `bytes_peak` in fp16 slots per layer.
        within_budget: whether `bytes_peak` is at most the budget; None without one.
        seconds: wall time.
        impls: which implementation of each op ran.
        nll_se: of a text, standard error of `nll` over long blocks.
        ppl: of a text, exp(nll).
        lost, exact, flips, asks, kl: of prompts, what the policy keeps, see `records.Kept`.
    """

    policy: str
    fingerprint: str
    workload: str
    nll: float
    dnll_full: Interval
    bytes_peak: int
    bytes_peak_text: int
    bytes_mean: float
    bytes_asked: int
    bytes_resident: int
    bytes_prompt: int | None = None
    slots16: float
    within_budget: bool | None
    seconds: float
    impls: dict[str, str]
    nll_se: float | None = None
    ppl: float | None = None
    lost: Interval | None = None
    exact: Interval | None = None
    flips: float | None = None
    asks: int = 0
    kl: float | None = None


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What policies were measured on.

    Attributes:
        name: `text`, or the name of the task or file.
        items: windows, or contexts.
        tokens: of a window, or of the longest sequence.
        scored: tokens of a text; of prompts, answers.
        digest: SHA-256 of the tokens.
        full: NLL with the full cache, nats per token.
        text: of a text, its name and hashes.
        score_from: of a text, the first scored position of a window.
        see: of prompts, `agnostic` or `aware`.
        own: asks whose reference is the full cache's own answer, for want of another.
        empty: of prompts, the NLL of the answers without the context.
        passes: whether the context certainly helps.
        full_exact: share of answers that the full cache gives.
    """

    name: str
    items: int
    tokens: int
    scored: int
    digest: str
    full: float
    text: dict[str, str] | None = None
    score_from: int | None = None
    see: See | None = None
    own: int = 0
    empty: float | None = None
    passes: bool | None = None
    full_exact: float | None = None


@dataclass(frozen=True, eq=False, repr=False)
class EvaluateResult:
    """What an evaluation measured.

    Attributes:
        rows: a policy on a workload each, workload by workload, in the order asked.
        workloads: what they were measured on; a text is the first.
        model: name, digest, dtype and device.
        left_out: methods without a row, or without one of some workload, which model or budget
            refuses, and why.
        folders: in kvpress' form, where they were asked for.
        self_check: a sentence, if what is scored of prompts is not what a deployed model sees.
    """

    rows: list[Evaluated]
    workloads: list[Workload]
    model: dict[str, str]
    left_out: dict[str, str] = field(default_factory=dict)
    folders: list[Path] = field(default_factory=list)
    self_check: str = ""

    def to_frame(self) -> "pd.DataFrame":
        """The rows, with every field; an interval has its limits in two more columns."""
        import pandas as pd

        return pd.DataFrame(columns(Evaluated, self.rows))

    def beyond(self, percent: float) -> list[str]:
        """Sentences on what loses more, on the mean: of perplexity, or of what a context is worth.

        Args:
            percent: that each policy may lose on each workload.
        """
        found = []
        for r in self.rows:
            share = math.expm1(min(r.dnll_full.mean, 20.0)) if r.lost is None else r.lost.mean
            if not 100 * share <= percent:  # also where the context is worth nothing
                of = "of perplexity" if r.lost is None else "of the context"
                found.append(f"{r.policy} loses {100 * share:.3g} % {of} on {r.workload}")
        return found

    def document(self) -> dict[str, Any]:
        """What `kvsearch eval --json` prints."""
        return {
            "model": self.model, "workloads": plain(self.workloads), "results": plain(self.rows),
            "left_out": self.left_out, "folders": [str(f) for f in self.folders],
            "self_check": self.self_check,
        }  # fmt: skip

    def __repr__(self) -> str:
        told = []
        for w in self.workloads:
            of = w.name if w.text is None else w.text["name"]
            mine = [r for r in self.rows if r.workload == w.name]
            rows = ", ".join(f"{r.policy} {r.dnll_full.mean:+z.4f}" for r in mine)
            told.append(f"n = {w.scored} {'tokens' if w.text else 'answers'} of {of}: {rows}")
        return f"EvaluateResult: dNLL to the full cache, nats/token, {'; '.join(told)}"


class NotWritten(RunError):
    """Losses that could not be written when all was measured.

    Attributes:
        result: what was measured.
    """

    def __init__(self, why: str, result: EvaluateResult) -> None:
        super().__init__(why)
        self.result = result


def write_nll(
    file: Path, nll: Sequence[tuple[str, NDArray[np.float32]]], ids: NDArray[np.int64]
) -> None:
    """Write columns policy, window, pos, token, nll.

    Args:
        file: to write.
        nll: nats per token `[W, T - 1]` of each policy, with its name.
        ids: token windows `[W, T]`; `token` is the one that was predicted, at position `pos`.
    """
    W, T = ids.shape
    n = W * (T - 1)
    columns = {
        "policy": pa.array([name for name, _ in nll for _ in range(n)]).dictionary_encode(),
        "window": np.tile(np.repeat(np.arange(W, dtype=np.int32), T - 1), len(nll)),
        "pos": np.tile(np.arange(1, T, dtype=np.int32), W * len(nll)),
        "token": np.tile(ids[:, 1:].astype(np.int32).ravel(), len(nll)),
        "nll": np.concatenate([found.ravel() for _, found in nll]),
    }
    write_parquet(file, pa.table(columns))
