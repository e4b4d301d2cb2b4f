"""When a run ends, and what its report has beside losses and bytes."""

from functools import partial

from kvsearch.options.checks import within
from kvsearch.options.declare import Config, option, part

_time = partial(option, group="Time")
_limits = partial(option, group="Limits")
MAX_DROP = 5.0  # per cent


@part
class ReportConfig(Config):
    """What is measured at the end, and when that is."""

    max_drop: float = _limits(
        MAX_DROP,
        "per cent of perplexity on a text, and of what the context is worth on prompts, that the "
        "recommended policy may lose; the report says whether it does",
        check=within(lambda x: 0 < x <= 100, "above 0 and at most 100"),
        metavar="PERCENT",
    )  # fmt: skip
    max_kld: float | None = _limits(
        None,
        "KL divergence from the full cache on answers, nats a token, likewise",
        check=within(lambda x: 0 < x < float("inf"), "a number above 0"),
        metavar="NATS",
    )  # fmt: skip
    bench: bool = _time(True, "measure decode speed at the end")
    minutes: float | None = _time(
        None,
        "stop after so many, with a report of what is known by then; the same command goes on",
        check=within(lambda minutes: 0 < minutes < float("inf"), "a number above 0"),
        python=" (`summary.open` says what is not)",
    )
