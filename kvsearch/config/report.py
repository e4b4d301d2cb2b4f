"""When a run ends, and what its report has beside losses and bytes."""

from functools import partial

from kvsearch.config.checks import within
from kvsearch.config.option import Config, option, part

_time = partial(option, group="Time")


@part
class ReportConfig(Config):
    """What is measured at the end, and when that is."""

    bench: bool = _time(True, "measure decode speed at the end")
    minutes: float | None = _time(
        None,
        "stop after so many, with a report of what is known by then; the same command goes on",
        check=within(lambda minutes: 0 < minutes < float("inf"), "a number above 0"),
        python=" (`summary.open` says what is not)",
    )
