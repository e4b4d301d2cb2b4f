"""Report rows as `front.csv` and as formatted cells: bytes, PPL, intervals and verdicts."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal

from kvsearch.files import csv_text
from kvsearch.report.describe import describe
from kvsearch.results.records import Interval, Kept, Row, Throughput
from kvsearch.results.student_t import quantile
from kvsearch.results.summary import Summary

Verdict = Literal["better", "worse", "no clear difference"]


def verdict(interval: Interval | None) -> Verdict:
    """Verdict from the 95 % interval of a loss difference; none if 0 is inside."""
    if interval is None or not math.isfinite(interval.lo) or not math.isfinite(interval.hi):
        return "no clear difference"
    if interval.hi < 0:
        return "better"
    return "worse" if interval.lo > 0 else "no clear difference"


def bytes_text(n: float) -> str:
    """Bytes in KiB, MiB or GiB with three digits."""
    value, unit = float(n), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if value < 1000:
            break
        value, unit = value / 1024, larger
    digits = 0 if unit == "B" or value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{digits}f} {unit}"


def ppl_text(ppl: float) -> str:
    """Perplexity with four digits; very large ones in powers of ten."""
    if not math.isfinite(ppl):
        return "not finite"
    if ppl >= 1e5:
        return f"{ppl:.1e}"
    return f"{ppl:,.0f}" if ppl >= 1000 else f"{ppl:.1f}" if ppl >= 100 else f"{ppl:.2f}"


def ppl_interval(row: Row) -> tuple[float, float]:
    """95 % interval of a row's PPL from its standard error; nan for a single block.

    It contains the difficulty of the text itself: compare rows by their paired differences instead.
    """
    half = quantile(0.975, row.blocks - 1) * row.nll_se if row.blocks > 1 else math.nan
    return math.exp(min(row.nll - half, 700.0)), math.exp(min(row.nll + half, 700.0))


def signed(x: float, digits: int = 3) -> str:
    """A number with its sign, a true minus, and no negative zero."""
    text = f"{x:+.{digits}f}"
    if float(text) == 0:
        return f"{0:.{digits}f}"
    return text.replace("-", "\N{MINUS SIGN}")


def interval_text(interval: Interval | None) -> str:
    """`+0.054 [+0.041, +0.067]` in nats per token, with digits that suit the width."""
    if interval is None:
        return "none"
    width = interval.hi - interval.lo
    digits = 3 if not 0 < width < 0.01 else 4 if width >= 0.001 else 5
    mean, lo, hi = (signed(v, digits) for v in (interval.mean, interval.lo, interval.hi))
    return f"{mean} [{lo}, {hi}]"


def at_least(row: Row) -> str:
    """How far a row is behind at least, if that was certain before it had all windows."""
    if row.stopped is None:
        return ""
    return f"at least {least(row)} behind the recommended one on search and report text"


def least(row: Row) -> str:
    """The same as a number; only for a row that was stopped."""
    assert row.stopped is not None
    return f"{row.stopped.lo:.3f}" if row.stopped.lo >= 0.001 else f"{row.stopped.lo:.1g}"


def behind_text(behind: Mapping[str, Interval]) -> str:
    """Baselines without a row and how far each was behind by then; empty without any."""
    return ", ".join(f"{name} {signed(gap.mean, 3)}" for name, gap in behind.items())


def sizes_text(summary: Summary) -> str:
    """With how many slots the best published method's loss is reached; empty if not measured."""
    if len(summary.curves) < 2 or summary.recommended is None:
        return ""
    mine, its = summary.curves[:2]
    rows = {r.name: r for r in summary.rows}
    if not mine.points or its.name not in rows:
        return ""
    row = rows[its.name]
    unit = row.bytes_peak / row.slots16
    loss = dict(its.points).get(row.bytes_peak)
    fits = [i for i, (_, y) in enumerate(mine.points) if loss is not None and y <= loss]
    if loss is None or not fits:
        return ""
    at = min(fits)
    slots, near = mine.points[at][0] / unit, "fewer than"
    if at:  # a line between two sizes, over the logarithm of the bytes
        (xa, ya), (xb, yb) = mine.points[at - 1 : at + 1]
        share = (ya - loss) / (ya - yb) if ya > yb else 1.0
        slots, near = xa / unit * (xb / xa) ** share, "about"
    return (
        f"with {row.slots16:,.3g} slots {its.name} loses as much as {mine.name} with {near} "
        f"{round(slots, -1 if slots >= 100 else 0):,.0f}"
    )


def kept_text(kept: Kept) -> str:
    """What is kept of a workload: of a text its perplexity, of questions the exact answers."""
    if kept.dnll is not None and kept.ppl is not None:
        return f"PPL {ppl_text(kept.ppl)}, {percent_text(kept.dnll)} over the full cache"
    assert kept.exact is not None and kept.flips is not None, "one of the two"
    kl = "" if kept.kl is None else f", KL {kept.kl:.3f}"
    return f"exact {100 * kept.exact.mean:.0f} % of {kept.asks}, flips {100 * kept.flips:.0f} %{kl}"


def percent_text(interval: Interval) -> str:
    """The same difference as a change of PPL: `+5.5 % [+4.2, +6.9]`."""
    mean, lo, hi = (
        signed(100 * math.expm1(min(v, 20.0)), 1) for v in (interval.mean, interval.lo, interval.hi)
    )
    if not math.isfinite(interval.lo):
        return f"{mean} % [no interval]"
    return f"{mean} % [{lo}, {hi}]"


def policy_files(rows: Sequence[Row]) -> dict[str, str]:
    """File name under `policies/` of each row, by row name; readable and unique."""
    names: dict[str, str] = {}
    for row in rows:
        stem = re.sub(r"[^a-z0-9.]+", "-", row.name.lower()).strip("-.") or "policy"
        taken = set(names.values())
        tries = (stem if i == 1 else f"{stem}-{i}" for i in range(1, len(rows) + 2))
        names[row.name] = next(f"{t}.json" for t in tries if f"{t}.json" not in taken)
    return names


def front_csv(rows: Sequence[Row]) -> str:
    """All report rows, one a line, floats in full so that they read back as they were.

    `Row` says what `nll`, `ppl` and `dnll_full` are where rows have different numbers of windows.
    Units: `nll`, `nll_se`, `dnll_*` nats per token; `blocks` that intervals rest on; `bytes_*`
    bytes per sequence; `slots16` fp16 slots per layer; `tokens` scored tokens; `seconds` wall
    time; `decode_*` as `Throughput`; `speed` modelled decode speed over the full cache's, where
    it was an objective; `stopped` how far a row was behind the recommended policy when it got no
    further windows. Of prompts, losses are shares of the context and `tokens` are contexts, `exact`
    is the share of answers that greedy decoding gives, and there are `lost[TASK]`, `exact[TASK]`,
    `flips[TASK]`, `kl[TASK]` and `asks[TASK]`, and beside prompts `lost[text]`, `ppl[text]` and
    `dnll[text]` (nats per token), see `records.Kept`, and `only_row`,
    `only_recommended` and `mcnemar_p`, see `records.Discordant`, and `needles`, a JSON list of
    `records.Needle`.
    `*_lo` and `*_hi` are 95 % limits. Flags are 1 or 0; an empty cell means not measured.
    """
    files = policy_files(rows)
    records = [_record(row, files[row.name]) for row in rows]
    stopped, timed, answered = (
        any(row.stopped is not None for row in rows),
        any(row.speed is not None for row in rows),  # where speed was an objective
        any(row.workloads for row in rows),  # where policies were measured on prompts
    )
    for cells, row in zip(records, rows, strict=True):
        cells |= {"windows": row.windows, **_three("stopped", row.stopped)} if stopped else {}
        cells |= {"speed": row.speed} if timed else {}
        cells |= _answers(row) if answered else {}
    return csv_text(records, list(records[0]) if records else ["name"])


def _record(row: Row, file: str) -> dict[str, Any]:
    cells: dict[str, Any] = {
        "name": row.name,
        "kind": row.kind,
        "on_front": int(row.on_front),
        "within_budget": int(row.within_budget),
        "tokens": row.tokens,
        "ppl": row.ppl,
        "nll": row.nll,
        "nll_se": row.nll_se,
        "blocks": row.blocks,
    }
    cells |= _three("dnll_full", row.dnll_full) | {"best": row.best}
    cells |= _three("dnll_best", row.dnll_best)
    cells["dnll_best_verdict"] = verdict(row.dnll_best) if row.dnll_best else None
    cells |= {
        "search_dnll": row.search_dnll,
        "bytes_peak": row.bytes_peak,
        "bytes_mean": row.bytes_mean,
        "bytes_resident": row.bytes_resident,
        "slots16": row.slots16,
        "seconds": row.seconds,
    }
    d = row.decode
    names = [f.name for f in fields(Throughput) if "replayed" not in f.name]  # runs replay nothing
    cells |= {f"decode_{name}": getattr(d, name) if d else None for name in names}
    cells |= {
        "impls": " ".join(f"{op}={impl}" for op, impl in sorted(row.impls.items())),
        "fingerprint": row.fingerprint,
        "policy_file": f"policies/{file}",
        "description": describe(row.policy),
    }
    return cells


def _answers(row: Row) -> dict[str, Any]:
    cells: dict[str, Any] = _three("exact", row.exact)
    d = row.discordant
    cells |= {
        "only_row": None if d is None else d.only_row,
        "only_recommended": None if d is None else d.only_recommended,
        "mcnemar_p": None if d is None else d.p,
        "needles": json.dumps([list(vars(n).values()) for n in row.needles]),
    }
    for k in row.workloads:
        cells |= _three(f"lost[{k.workload}]", k.lost)
        if k.dnll is not None:
            cells |= {f"ppl[{k.workload}]": k.ppl} | _three(f"dnll[{k.workload}]", k.dnll)
            continue
        cells |= _three(f"exact[{k.workload}]", k.exact)
        cells |= {f"flips[{k.workload}]": k.flips, f"asks[{k.workload}]": k.asks}
        cells |= {f"kl[{k.workload}]": k.kl}
    return cells


def _three(name: str, interval: Interval | None) -> dict[str, float | None]:
    if interval is None:
        return {name: None, f"{name}_lo": None, f"{name}_hi": None}
    return {name: interval.mean, f"{name}_lo": interval.lo, f"{name}_hi": interval.hi}
