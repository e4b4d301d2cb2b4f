"""Whether what a run recommends loses more than its user allows, and which bytes would do."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from kvsearch.results.records import Interval
from kvsearch.results.summary import Summary

FAR = 0.3  # nats a token, or shares of the context, from which a starting point is far behind


@dataclass(frozen=True)
class Loss:
    """One loss of the recommended policy beside what is allowed.

    Attributes:
        of: the workload.
        mean, most: the loss, and the upper limit of its 95 % interval.
        allowed: the most that the user allows.
        unit: `PPL`, shares of it; `context`, shares of what the context is worth; or `KLD`, nats.
    """

    of: str
    mean: float
    most: float
    allowed: float
    unit: Literal["PPL", "context", "KLD"]


@dataclass(frozen=True)
class Verdict:
    """What a user may expect of the recommended policy.

    Attributes:
        holds: whether every loss is within what is allowed: `certainly`, also at the upper limit
            of its interval; `perhaps`, on the mean; or `no`.
        losses: each of them.
        facts: workload -> answers that the policy and the full cache both give exactly, those of
            the full cache, and the share of answer tokens whose first choice changes.
        bytes: per sequence of the smallest size of the policy that was measured and holds; None
            where the budget holds, or none does.
    """

    holds: Literal["certainly", "perhaps", "no"]
    losses: tuple[Loss, ...]
    facts: dict[str, tuple[int, int, float]]
    bytes: int | None = None

    @property
    def text(self) -> str:
        """In a sentence or two."""
        said = [_loss(x) for x in self.losses]
        said += [
            f"{kept} of {of} {name} that the full cache gives are kept, {100 * flips:.1f} % of "
            "answer tokens change"
            for name, (kept, of, flips) in self.facts.items()
        ]
        allowed = {f"{100 * x.allowed:g} %" for x in self.losses if x.unit != "KLD"}
        allowed |= {f"{x.allowed:g} nats of KLD" for x in self.losses if x.unit == "KLD"}
        word = "not" if self.holds == "no" else self.holds
        limit = f"limit{'s' * (len(allowed) > 1)} of {' and '.join(sorted(allowed))}"
        return f"{'; '.join(said)}: {word} within the {limit}"


def judged(summary: Summary) -> Verdict | None:
    """The verdict on the recommended policy; None without one."""
    if summary.recommended is None or summary.recommended not in {r.name for r in summary.rows}:
        return None
    losses = tuple(_losses(summary))
    holds: Literal["certainly", "perhaps", "no"] = "perhaps"
    if any(x.mean > x.allowed for x in losses):
        holds = "no"
    elif all(x.most <= x.allowed for x in losses):
        holds = "certainly"
    found = None if holds != "no" else _enough(summary)
    return Verdict(holds, losses, dict(_facts(summary)), found)


def far_behind(summary: Summary) -> str:
    """A sentence on starting points that lose much on this model; empty without one."""
    lost = [
        f"{t.name} {t.dnll:+.2f}"
        for t in summary.trials
        if t.kind == "earlier" and t.dnll is not None and t.dnll >= FAR
    ]
    if not lost:
        return ""
    unit = "of the context" if summary.settings.see is not None else "nats a token"
    return (
        f"found by searches on another model, and far behind on this one ({unit}, search part): "
        f"{', '.join(lost)}"
    )


def _losses(summary: Summary) -> Iterator[Loss]:
    row, limits = summary.row(summary.recommended or ""), summary.limits
    allowed = limits.max_drop / 100
    if not row.workloads:
        planned = summary.against("full")  # one comparison; the row's own is widened for all rows
        yield _ppl("the text", row.dnll_full if planned is None else planned.dnll, allowed)
    for kept in row.workloads:
        if kept.dnll is not None:
            yield _ppl(kept.workload, kept.dnll, allowed)
            continue
        yield Loss(kept.workload, kept.lost.mean, kept.lost.hi, allowed, "context")
        if limits.max_kld is not None and kept.kl is not None:
            yield Loss(kept.workload, kept.kl, math.nan, limits.max_kld, "KLD")


def _ppl(of: str, dnll: Interval, allowed: float) -> Loss:
    mean, most = (math.expm1(min(x, 20.0)) for x in (dnll.mean, dnll.hi))
    return Loss(of, mean, most, allowed, "PPL")


def _loss(x: Loss) -> str:
    if x.unit == "KLD":
        return f"KL divergence on {x.of} {x.mean:.3f} nats a token"
    what = "PPL" if x.unit == "PPL" else "the context"
    if math.isnan(x.most):
        return f"about {100 * x.mean:.1f} % of {what} lost on {x.of}"
    return f"at most {max(0.0, 100 * x.most):.1f} % of {what} lost on {x.of}"


def _facts(summary: Summary) -> Iterator[tuple[str, tuple[int, int, float]]]:
    """Of one asked workload; of several, the answers of all together have no names."""
    row, full = summary.row(summary.recommended or ""), summary.row("full")
    asked = row.asked
    if len(asked) != 1 or full.discordant is None or asked[0].flips is None:
        return
    (its,) = (k for k in full.asked if k.workload == asked[0].workload)
    assert its.exact is not None, "something is asked"
    of = round(its.exact.mean * its.asks)
    yield asked[0].workload, (max(0, of - full.discordant.only_row), of, asked[0].flips)


def _enough(summary: Summary) -> int | None:
    """Bytes of the smallest size of the recommended policy whose mean loss is allowed."""
    allowed = summary.limits.max_drop / 100
    curve = next((c for c in summary.curves if c.name == summary.recommended), None)
    points = () if curve is None else curve.points
    shares = summary.settings.see is not None
    lost = [(size, x if shares else math.expm1(min(x, 20.0))) for size, x in points]
    return min((size for size, x in lost if x <= allowed), default=None)
