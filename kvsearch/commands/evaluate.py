"""Named methods and policy files on one text, paired with the full cache: `kvsearch eval`."""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvsearch.commands.nll_table import write_nll
from kvsearch.config.commands import EvaluateConfig
from kvsearch.config.function import takes
from kvsearch.errors import KvsearchError, RunError
from kvsearch.evaluation.measurement import Measurement
from kvsearch.files import require_writable
from kvsearch.knobs import Setting
from kvsearch.policy import Policy, layout
from kvsearch.records import Interval, columns, plain
from kvsearch.session import inputs
from kvsearch.session.session import Session
from kvsearch.stats import paired, standard_error
from kvsearch.text import windows as cut_windows

if TYPE_CHECKING:
    import pandas as pd

CONTEXT, MOST = 2048, 8192  # tokens of a window by default, and at most without --context


@dataclass(frozen=True)
class Evaluated:
    """One policy on the text. NLL in nats per token, bytes per sequence, all over scored tokens.

    Attributes:
        policy: its name.
        fingerprint: identity of the policy on this model.
        nll, nll_se: mean NLL and its standard error over long blocks.
        ppl: exp(nll).
        dnll_full: minus the full cache on the same tokens; above 0 is worse.
        bytes_peak, bytes_mean, bytes_asked: exact, from the policy: largest, mean, and at the end
            of a window.
        bytes_peak_text: the largest total on these windows. Where the policy has anchors the text
            decides it, and `bytes_mean` and `bytes_resident`; `bytes_peak` and `bytes_asked` are
            then the same ceiling, which no text exceeds at any step.
        bytes_resident: summed over the real tensors at the end of a window.
        slots16: `bytes_peak` in fp16 slots per layer.
        within_budget: whether `bytes_peak` is at most the budget; None without one.
        seconds: wall time.
        impls: which implementation of each op ran.
    """

    policy: str
    fingerprint: str
    nll: float
    nll_se: float
    ppl: float
    dnll_full: Interval
    bytes_peak: int
    bytes_peak_text: int
    bytes_mean: float
    bytes_asked: int
    bytes_resident: int
    slots16: float
    within_budget: bool | None
    seconds: float
    impls: dict[str, str]


@dataclass(frozen=True, eq=False, repr=False)
class EvaluateResult:
    """What an evaluation measured.

    Attributes:
        rows: one per policy, in the order asked.
        left_out: methods without a row, which model or budget refuses, and why.
        model: name, digest, dtype and device.
        text: name and hashes.
        tokens: scored tokens, `n` of every row.
        windows, context: how many windows of how many tokens.
        score_from: first scored position of a window.
        full_nll: of the full cache, nats per token.
    """

    rows: list[Evaluated]
    model: dict[str, str]
    text: dict[str, str]
    tokens: int
    windows: int
    context: int
    score_from: int
    full_nll: float
    left_out: dict[str, str] = field(default_factory=dict)

    def to_frame(self) -> "pd.DataFrame":
        """The rows, with every field; `dnll_full` has its interval in two more columns."""
        import pandas as pd

        return pd.DataFrame(columns(Evaluated, self.rows))

    def document(self) -> dict[str, Any]:
        """What `kvsearch eval --json` prints."""
        about = {k: v for k, v in self.__dict__.items() if k != "rows"}
        return {**about, "results": plain(self.rows)}

    def __repr__(self) -> str:
        rows = ", ".join(f"{r.policy} {r.dnll_full.mean:+z.4f}" for r in self.rows)
        return (
            f"EvaluateResult: dNLL to the full cache, nats/token, n = {self.tokens} tokens of "
            f"{self.text['name']}: {rows}"
        )


class NotWritten(RunError):
    """Losses that could not be written when all was measured.

    Attributes:
        result: what was measured.
    """

    def __init__(self, why: str, result: EvaluateResult) -> None:
        super().__init__(why)
        self.result = result


@takes(EvaluateConfig)
def evaluate(config: EvaluateConfig) -> EvaluateResult:
    """Measure policies against the full cache, paired token by token.

    The options are those of `kvsearch eval`. Of several policies, methods that model or budget
    refuse are left out.

    Returns:
        A row per policy, with paired differences to the full cache, and what was left out.

    Raises:
        KvsearchError: something that the caller can mend, in one sentence.
        NotWritten: such an error after all was measured; it has the result.
    """
    session = Session(config, config.policies)
    W, T = _extent(config.tokens, config.context, config.windows)
    config.check_prompt(T)
    if config.nll_out is not None:
        require_writable(config.nll_out)
    loaded, shown = session.load(context=T), session.shown
    setting, budget = session.setting(T, config.prompt), config.budget(loaded.shape)
    start = config.score_from or max(1, int(budget.slots if budget else 1))
    if start >= T:
        raise KvsearchError(f"--score-from {start} lies outside a window of {T}")
    start = max(start, config.prompt)
    source, evaluator = session.text, session.evaluator
    ids = cut_windows(source, count=W, length=T)
    setting = session.measured(setting, source, count=W, length=T)
    chosen, left_out = session.some_policies(setting)
    measured: list[tuple[Policy, Measurement]] = []
    with shown.step("evaluate", len(chosen) + 1) as step:
        full = evaluator.quality(Policy(name="full"), ids)
        step.advance()
        for policy in chosen:
            quality = evaluator.quality(policy, ids, prompt=config.prompt)
            measured.append((policy, quality))
            if (found := quality.anchored) is not None:
                shown.say(
                    f"{policy.name}: {found.count} anchors in {W} windows of {T} tokens"
                    + ("; warning: without any, no sequence closes" if not found.count else "")
                )
            step.advance(note=policy.name or "")
    result = EvaluateResult(
        rows=[_row(p, q, full, setting, start) for p, q in measured],
        model=inputs.about(loaded),
        text={
            "name": source.name,
            "text_sha256": source.text_sha256,
            "token_sha256": source.token_sha256,
        },
        tokens=int(full.nll[:, start - 1 :].size),
        windows=W,
        context=T,
        score_from=start,
        full_nll=float(full.nll[:, start - 1 :].mean()),
        left_out=left_out,
    )
    if config.nll_out is not None:
        try:
            write_nll(config.nll_out, [(p.name or "", q.nll) for p, q in measured], ids)
        except RunError as e:
            raise NotWritten(str(e), result) from e
    return result


def _extent(tokens: int | None, context: int | None, windows: int | None) -> tuple[int, int]:
    """Windows and tokens of each, from any of the three options."""
    if context is None:
        total = CONTEXT if tokens is None else tokens
        context = min(total, MOST) if windows is None else total // windows
        if context < 1:
            raise KvsearchError(
                f"{total} tokens are too few for {windows} windows: lower --windows or raise "
                "--tokens"
            )
    if windows is None:
        windows = 1 if tokens is None else max(1, tokens // context)
    return windows, context


def _row(
    policy: Policy, quality: Measurement, full: Measurement, setting: Setting, start: int
) -> Evaluated:
    nll = quality.nll[:, start - 1 :]
    mean = float(nll.mean())
    sizes, found, tokens = layout(policy, setting.shape), quality.anchored, setting.tokens
    tokens = tokens if found is None else found.tokens
    peak, limit = sizes.bytes_peak(tokens, setting.prompt), setting.budget_bytes
    mean_bytes = sizes.bytes_mean(tokens, setting.prompt) if found is None else found.bytes.mean
    return Evaluated(
        policy=policy.name or "",
        fingerprint=policy.fingerprint(setting.shape.layers),
        nll=mean,
        nll_se=standard_error(nll),
        ppl=math.exp(mean),
        dnll_full=paired(nll, full.nll[:, start - 1 :]),
        bytes_peak=peak,
        bytes_peak_text=peak if found is None else found.bytes.peak,
        bytes_mean=mean_bytes,
        bytes_asked=sizes.bytes_at(tokens, setting.prompt),
        bytes_resident=quality.bytes_resident,
        slots16=peak / setting.shape.budget_bytes(1),
        within_budget=None if limit is None else peak <= limit,
        seconds=quality.seconds,
        impls=quality.impls,
    )
