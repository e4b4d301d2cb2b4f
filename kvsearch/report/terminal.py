"""What the commands print for people: short tables on stdout."""

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvsearch.model_analysis.key_offsets import KeyMeans
from kvsearch.policy import HeadLosses
from kvsearch.report.describe import describe
from kvsearch.report.facts import STATES, gained, left_out, placed, text_name, unused
from kvsearch.report.figure import LABEL
from kvsearch.report.recommendation import costs, judgement, second_reading
from kvsearch.report.screen import Column, columns_of, folded, printed, table
from kvsearch.report.tables import (
    behind_text,
    bytes_text,
    kept_text,
    least,
    sizes_text,
)
from kvsearch.report.words import FACTS, MIXED, TEXT, Words, words_of
from kvsearch.results.limits import judged
from kvsearch.results.records import REPORT, Interval, Row, Throughput, plain
from kvsearch.results.summary import Summary


def closing(summary: Summary, folder: Path) -> str:
    """The end of a run: the table, the recommendation, and where everything is.

    On a terminal no line but that of a path is longer than the terminal is wide.
    """
    width = printed()
    rows = sorted(summary.rows, key=lambda r: (not r.within_budget, r.nll))
    if not rows:
        return f"nothing was measured to the end; {folder} has the policies tried so far"
    w = words_of(summary)
    counted = "tokens" if w is TEXT else w.count
    told = f"{w.loss}: loss over the full cache, {w.unit}" if w is TEXT else w.above
    unit = [
        f"  n: {counted} of {_on(REPORT, summary)}; {told}, with 95 % intervals corrected for "
        f"{len(rows) - 1} rows" + "; 0.01 is about 1 % of PPL" * (w is TEXT)
    ]
    if where := placed(summary):
        unit.append(f"  {where}")
    known = w is TEXT or any(r.exact is not None for r in rows)
    columns = [
        Column("  policy", 24, left=True),
        *[Column("PPL", 8, drop=1)] * (w is MIXED),
        *[Column(_asked(rows, w), 8, drop=1)] * known,
        Column(f"  {w.loss} (95 %)", 28, left=True, brief=True),
        Column("fp16 slots", 10, drop=3),
        Column("MiB", 8),
        Column("n", 7, drop=2),
    ]
    cells, notes = [], []
    for r in rows:
        mark = "->" if r.name == summary.recommended else ("* " if r.on_front else "  ")
        note = [] if r.within_budget or r.kind == "full" else ["over budget"]
        if r.kind == "searched" and not r.on_front:
            note.append(f"off the front on {w.these}")
        notes.append("  ".join(note))
        cells.append(
            [f"{mark}{r.name}", *[_more_ppl(r)] * (w is MIXED), *[_level(r, w)] * known,
             f"  {r.dnll_full}", f"{r.slots16:.1f}", f"{r.bytes_peak / 2**20:.2f}", str(r.tokens)]
        )  # fmt: skip
    found = ["", *folded([summary.open] if summary.open else [], width)]
    found += table(columns, cells, width, notes)
    lines = [*unit, "  -> recommended   * on the front"]
    if behind := [f"{r.name} {least(r)}" for r in rows if r.stopped is not None]:
        lines.append(
            f"  certainly behind the recommended policy, on search and report {w.material} "
            f"together by at least: {', '.join(behind)}"
        )
    lines.append("")
    for c in summary.rechecks:
        if c in (summary.against("method"), summary.gain):
            continue  # said below
        lines.append(
            f"  {c.policy} against {c.against} on {_on(c.text, summary)}: {c.dnll} (n = {c.tokens})"
        )
    counts = ", ".join(f"{n} {STATES.get(k, k)}" for k, n in sorted(summary.counts.items()))
    if summary.importances:
        top = [f"{k} {100 * v:.0f} %" for k, v in list(summary.importances.items())[:5]]
        lines.append(f"  axes that matter most around the best policies: {', '.join(top)}")
    tokens = sum(t.tokens for t in summary.trials)
    lines.append(
        f"  {len(summary.trials)} policies tried: {counts}; {tokens:,} search tokens"
        + ("" if summary.seconds is None else f"; {summary.seconds:.0f} s")
        + (" since the run was resumed" if summary.resumed else "")
    )
    if absent := behind_text(summary.behind):
        lines.append(
            f"  not among the best on the search {w.material}, and not measured further "
            f"({w.loss} to the recommended policy there): {absent}"
        )
    if why := unused(summary):
        lines.append(f"  not measured: {why}")
    if missing := left_out(summary):
        lines.append(f"  left out: {missing}; trials.jsonl has each reason in full")
    if summary.recommended is not None:
        lines += ["", *_recommendation(summary.row(summary.recommended), summary)]
    files = [
        "",
        f"report    {folder / 'report.html'}",
        f"front     {folder / 'front.csv'}",
        f"plot      {folder / 'pareto.html'}",
        f"policies  {folder / 'policies'}",
    ]
    if summary.recommended is not None:
        files.append(f"best      {folder / 'best.json'}")
    whole = "\n".join(lines).split("\n")
    return "\n".join([*found, *folded(whole, width), *files])


def standing(summary: Summary) -> list[str]:
    """What an unfinished run knows: the best policy so far, and the best of each kind beside it.

    Of rows that cannot be told apart yet, the order may still change.
    """
    if summary.recommended is None or not summary.rows:
        return []
    w, best = words_of(summary), summary.row(summary.recommended)
    opponents = {
        "best published": summary.against("method"),
        "best combination": summary.against("combined"),
    }
    verdict = judged(summary)
    praised = verdict is None or verdict.holds != "no"
    shown = {"recommended" if praised else "least lost": best}
    shown |= {title: summary.row(r.against) for title, r in opponents.items() if r is not None}
    text = w is TEXT
    level, known = "PPL" if text else _asked([best], w), text or best.exact is not None
    columns = [
        Column("so far", 18, left=True),
        Column("policy", max(14, *(len(r.name) + 1 for r in shown.values())), left=True),
        *[Column("PPL", 8, drop=1)] * (w is MIXED),
        *[Column(level, 8, drop=1)] * known,
        Column(f"  {w.loss} (95 %)", 28, left=True, brief=True),
        Column("MiB", 7),
        Column("tokens" if text else "n" if (w is MIXED) else "contexts", 10, drop=2),
    ]
    cells = [
        [title, r.name, *[_more_ppl(r)] * (w is MIXED),
         *[_more_ppl(r) if text else w.level_of(r)[0]] * known, f"  {r.dnll_full}",
         f"{r.bytes_peak / 2**20:.2f}", str(r.tokens)]
        for title, r in shown.items()
    ]  # fmt: skip
    width, where = columns_of(sys.stderr), text_name(summary)
    full = bytes_text(summary.row("full").bytes_peak)
    head = f"{w.loss}: loss over the full cache ({full}), {w.unit}, on {where}"
    if not text:
        head = f"{w.above}; the full cache takes {full}; on {where}"
    return [*table(columns, cells, width), *folded([head], width)]


def _more_ppl(row: Row) -> str:
    """Perplexity over the full cache's: of the text, where that is one workload among others."""
    kept = row.text
    found = row.dnll_full if kept is None or kept.dnll is None else kept.dnll
    return f"{100 * math.expm1(min(found.mean, 20.0)):+.1f} %"


def _asked(rows: Sequence[Row], words: Words) -> str:
    """What stands above exact answers: `facts`, where nothing else is asked."""
    names = {k.workload for r in rows for k in r.asked}
    return names.pop() if names == {FACTS} else words.level


def _on(text: str, summary: Summary) -> str:
    """A text by its name; of an unfinished run the part that was measured by then."""
    if text == REPORT and summary.open:
        return text_name(summary)
    return words_of(summary).report if text == REPORT else text


def _level(row: Row, words: Words) -> str:
    return f"{row.ppl:.3f}" if words is TEXT else words.level_of(row)[0]


def _recommendation(row: Row, summary: Summary) -> list[str]:
    budget = summary.settings.budget_slots
    verdict = judged(summary)
    head = f"Recommended for {budget:g} fp16 slots per layer"
    if verdict is not None and verdict.holds == "no":
        head = f"Nothing tried at {budget:g} fp16 slots per layer is within the limits; closest"
    lines = [f"{head}: {row.name} ({LABEL[row.kind]})"]
    if said := costs(summary):
        lines.append(f"  {said[0]}")
    lines += [f"  {x}" for x in judgement(summary)]
    if again := second_reading(summary):
        lines.append(f"  {again}")
    if (read := row.text) is not None:
        lines.append(
            f"  {read.workload}: {kept_text(read)}; context lost {_percent(plain(read.lost))} %"
        )
    for k in row.asked:
        full = next(x for x in summary.row("full").workloads if x.workload == k.workload)
        lines.append(
            f"  {k.workload}, question-{summary.settings.see}: exact "
            f"{_percent(plain(k.exact))} % of {k.asks} answers, the full cache "
            f"{_percent(plain(full.exact))} % of {full.asks}; context lost "
            f"{_percent(plain(k.lost))} %"
        )
        assert k.flips is not None, "where something is asked"
        kl = "" if k.kl is None else f", KL divergence {k.kl:.3f} nats a token"
        lines.append(f"    to the full cache: flips {100 * k.flips:.1f} % of answer tokens{kl}")
    best = summary.against("method")
    if best is not None:
        change = f"PPL {100 * (math.exp(best.dnll.mean) - 1):+z.1f} %, "
        lines.append(
            f"  against the best published method, {best.against}: "
            f"{change if words_of(summary) is TEXT else ''}{words_of(summary).loss} {best.dnll}"
            f"{' (no clear difference)' * best.dnll.undecided}, n = {best.tokens}"
        )
        if (d := summary.row(best.against).discordant) is not None:
            lines.append(
                f"  answers that only one of the two gives exactly: {d.only_recommended} by "
                f"{row.name}, {d.only_row} by {best.against} (McNemar's exact test, p = {d.p:.2g})"
            )
    if not summary.open and (found := gained(summary)):
        lines.append(f"  {found}")
    if reached := sizes_text(summary):
        lines.append(f"  {reached}")
    pairs = [(r.speed, r.decode.ratio) for r in summary.rows if r.decode and r.speed]
    if len(pairs) > 1:
        off = sorted(abs(modelled / measured - 1) for modelled, measured in pairs)
        lines.append(
            f"  decode speed over the full cache, modelled against measured: median error "
            f"{100 * off[len(off) // 2]:.0f} % over {len(pairs)} policies"
        )
    if row.decode is not None:
        lines.append("  " + bench_lines(row.name, row.decode).replace("\n", "\n  "))
    lines.append(f"  the policy: {describe(row.policy)}")
    return lines


def results_table(document: dict[str, Any]) -> str:
    """The results of `kvsearch eval`: one block a workload."""
    width, found = printed(), list[str]()
    for w in document["workloads"]:
        rows = [r for r in document["results"] if r["workload"] == w["name"]]
        found += (_answers if w["text"] is None else _losses)(w, rows, width)
    lines = [f"left out: {name}: {why}" for name, why in document["left_out"].items()]
    if any(w["text"] is None for w in document["workloads"]):
        told = "context lost: rise of the answers' NLL over the full cache; 0 is the full cache"
        lines = [f"{told}, 100 no context", *lines]
    return "\n".join([*found, *folded(lines, width)])


def _losses(workload: dict[str, Any], rows: list[dict[str, Any]], width: int | None) -> list[str]:
    """What policies lose on a text."""
    columns = [
        Column("policy", 22, left=True),
        Column("PPL", 9, drop=1),
        Column("  dNLL to full (95 %)", 28, left=True, brief=True),
        Column("fp16 slots", 10, drop=2),
        Column("MiB", 8),
        Column("s", 7, drop=3),
    ]
    cells = [
        [r["policy"], f"{r['ppl']:.3f}", f"  {Interval(**r['dnll_full'])}", *_sizes(r)]
        for r in rows
    ]
    told = (
        f"n = {workload['scored']} tokens of {workload['text']['name']}, scored from position "
        f"{workload['score_from']} of {workload['items']} x {workload['tokens']}; dNLL in "
        "nats/token"
    )
    return [*table(columns, cells, width, _over(rows)), *folded([told], width)]


def _answers(workload: dict[str, Any], rows: list[dict[str, Any]], width: int | None) -> list[str]:
    """What policies keep of prompts and answers."""
    columns = [
        Column("  policy", 22, left=True),
        Column("context lost, % (95 %)", 26, left=True, drop=1, brief=True),
        Column("exact, % (95 %)", 20, left=True, brief=True),
        Column("NLL", 6, drop=4),
        Column("flips, %", 10, drop=3),
        Column("fp16 slots", 12, drop=2),
        Column("MiB", 8),
        Column("s", 7, drop=5),
    ]
    w = workload
    head = (
        f"{w['name']}, question-{w['see']}: {w['scored']} answers on {w['items']} contexts"
        + (f", {w['own']} of them the full cache's own" if w["own"] else "")
        + f", up to {w['tokens']} tokens; full cache exact {100 * w['full_exact']:.0f} %, NLL "
        f"{w['full']:.2f}, without the context {w['empty']:.2f}"
        + ("" if w["passes"] else "; NOT USABLE: this model does not need the context here")
    )
    cells = [
        [f"  {r['policy']}", _percent(r["lost"]), _percent(r["exact"]), f"{r['nll']:.2f}",
         f"{100 * r['flips']:.0f}", *_sizes(r)]
        for r in rows
    ]  # fmt: skip
    found = [*folded([head], width), *table(columns, cells, width, _over(rows))]
    if kl := [f"{r['policy']} {r['kl']:.3f}" for r in rows if r["kl"] is not None]:
        said = f"  KL divergence to the full cache, nats a token: {', '.join(kl)}"
        found += folded([said], width)
    return found


def _sizes(row: dict[str, Any]) -> list[str]:
    mib = row["bytes_peak"] / 2**20
    return [f"{row['slots16']:.1f}", f"{mib:.2f}", f"{row['seconds']:.1f}"]


def _over(rows: list[dict[str, Any]]) -> list[str]:
    return ["over budget" if r["within_budget"] is False else "" for r in rows]


def _percent(d: dict[str, float | None]) -> str:
    mean, lo, hi = (d[k] for k in ("mean", "lo", "hi"))
    if mean is None or not math.isfinite(mean):
        return "-"
    if lo is None or hi is None or not (math.isfinite(lo) and math.isfinite(hi)):
        return f"{100 * mean:.0f} [no interval]"
    return f"{100 * mean:.0f} [{100 * lo:.0f}, {100 * hi:.0f}]"


def head_lines(losses: HeadLosses, where: str) -> str:
    """What every KV head loses, a row a layer, in units of the mean."""
    rows = losses.sensitivity
    lines = [
        f"loss of each KV head with {losses.starved} slots, in units of the mean ({where})",
        f"{'layer':<7}" + "".join(f"{f'head {h}':>8}" for h in range(losses.heads)),
    ]
    lines += [f"{i:<7}" + "".join(f"{x:>8.2f}" for x in row) for i, row in enumerate(rows)]
    flat = sorted((x for row in rows for x in row), reverse=True)
    top = sum(flat[: max(1, len(flat) // 10)]) / sum(flat)
    lines.append(f"a tenth of the heads has {100 * top:.0f} % of the loss")
    return "\n".join(lines)


def key_lines(keys: KeyMeans) -> str:
    """What the keys of every layer have in common."""
    lines = [
        "share of the keys' energy that a head's mean key holds",
        f"{'layer':<7}{'as they are':>12}{'before they are turned':>24}",
    ]
    lines += [f"{i:<7}{a:>12.2f}{b:>24.2f}" for i, (a, b) in enumerate(keys.shares)]
    verdict = "subtract it (quantizer.offset)" if keys.large else "low bits stand it"
    lines.append(f"largest {max(a for a, _ in keys.shares):.2f}: {verdict}")
    return "\n".join(lines)


def bench_lines(name: str, t: Throughput) -> str:
    """Decode speed in words."""
    lines = (
        f"decode at context {t.context} on {t.device}: {t.tokens_per_s:.1f} tokens/s against "
        f"{t.full_tokens_per_s:.1f} with the full cache\n"
        f"{name}/full {t.ratio:.2f} (quartiles {t.ratio_lo:.2f} to {t.ratio_hi:.2f}, {t.pairs} "
        f"pairs); cache {t.bytes_resident / 2**20:.2f} MiB against {t.full_bytes / 2**20:.2f} MiB"
    )
    if t.replayed is not None and t.full_replayed is not None:
        lines += (
            f"\nreplays of a CUDA graph: {100 * t.replayed:.0f} % of the policy's tokens, "
            f"{100 * t.full_replayed:.0f} % of the full cache's"
        )
    return lines
