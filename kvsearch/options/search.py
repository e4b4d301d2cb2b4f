"""Which policies are proposed and compared."""

from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any

from kvsearch.errors import KvsearchError, named
from kvsearch.options.checks import at_least, names
from kvsearch.options.declare import ALWAYS, CHANGED, JOINED, Config, Given, Word, option, part
from kvsearch.options.workload import Words
from kvsearch.policy_search.samplers import DEFAULT as DEFAULT_SAMPLER
from kvsearch.policy_search.samplers import NAMES
from kvsearch.policy_space.portfolio import DEFAULT as DEFAULT_PORTFOLIO

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

OBJECTIVES = ("nll", "bytes", "throughput")
DEFAULT_SPACE = "default"
Name = Given[str | PathLike[str], str]
_search = partial(option, group="Search")


def _count(value: Any) -> int | None:
    """The number, or None for `auto`."""
    try:
        return None if value in (None, "auto") else int(value)
    except ValueError:
        raise ValueError(f"{value!r} is neither a whole number nor auto") from None


def _objectives(_: str, given: tuple[str, ...]) -> None:
    if given not in (OBJECTIVES[:2], OBJECTIVES):
        raise KvsearchError(
            f"--objectives must be {','.join(OBJECTIVES[:2])} or {','.join(OBJECTIVES)}, "
            f"got {named(','.join(given))}"
        )


@part
class SearchConfig(Config):
    """What proposes policies, out of which, and what they are compared with."""

    trials: int | None = _search(
        None,
        "policies beyond the methods; auto: up to 12, while the search expects to gain by them",
        check=at_least(0),
        word=Word("N|auto", _count, (int,), "a whole number or auto", "auto"),
        shell="auto", python="; None is auto",
    )  # fmt: skip
    space: Name = _search(DEFAULT_SPACE, "search space: name or YAML file", str)
    target: str | None = _search(
        None,
        "search only what this runtime can execute, see `kvsearch targets`",
        metavar="RUNTIME",
        recorded=CHANGED,
    )
    sampler: "str | BaseSampler" = _search(
        DEFAULT_SAMPLER,
        ", ".join(NAMES),
        recorded=ALWAYS,
        python="; or an object such as `optuna.samplers.TPESampler(seed=1)`, with which `seed` has "
        "no effect and a run that was killed goes on with other proposals than an uninterrupted "
        "one, since the state of the object is not kept",
    )
    objectives: Words = _search(
        OBJECTIVES[:2], "nll,bytes or nll,bytes,throughput", names,
        check=_objectives, shell=JOINED.join(OBJECTIVES[:2]), recorded=ALWAYS,
    )  # fmt: skip
    warm_start: bool = _search(True, "start from the published methods", recorded=ALWAYS)
    exclude_method: Words = _search(
        (),
        "leave a method out of the warm start; repeatable",
        names,
        metavar="METHOD",
        recorded=ALWAYS,
    )
    all_methods: bool = _search(
        False,
        "compare with every published method, not only with those that were ever the best of "
        "their kind, and give each a row of the report, not only the best few on the search text",
    )
    portfolio: Name = _search(
        DEFAULT_PORTFOLIO,
        "policies of earlier searches to evaluate first",
        str,
        metavar="FILE|none",
    )
    seed: int = _search(0, "of the sampler", recorded=ALWAYS)

    def check(self) -> None:
        """Refuse a space beside that of a target."""
        super().check()
        if self.target is not None and self.space != DEFAULT_SPACE:
            raise KvsearchError("--target searches a space of its own; leave --space out")
