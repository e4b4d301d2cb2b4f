"""What the commands print for people: short tables on stdout."""

import math
from pathlib import Path
from typing import Any

from kvsearch.policy import HeadLosses
from kvsearch.records import REPORT, Interval, Row, Summary, Throughput, plain
from kvsearch.report.describe import describe
from kvsearch.report.facts import STATES, left_out, placed, text_part
from kvsearch.report.tables import at_least, behind_text, needles_text, sizes_text
from kvsearch.report.words import TEXT, Words, words_of


def closing(summary: Summary, folder: Path) -> str:
    """The end of a run: the table, the recommendation, and where everything is."""
    rows = sorted(summary.rows, key=lambda r: (not r.within_budget, r.nll))
    if not rows:
        return f"nothing was measured to the end; {folder} has the policies tried so far"
    w = words_of(summary)
    counted = "contexts of the report" if summary.prompted else "tokens of report text"
    unit = [
        f"  n {counted}; {w.loss} to the full cache in {w.unit}, 95 % intervals corrected for "
        f"{len(rows) - 1} rows"
    ]
    if where := placed(summary):
        unit.append(f"  {where}")
    head = (
        f"{'':2}{'policy':<22}{w.level:>8}  {f'{w.loss} (95 %)':<26}{'fp16 slots':>10}{'MiB':>8}"
        f"{'n':>7}"
    )
    lines = ["", *([summary.open] if summary.open else []), head]
    for r in rows:
        mark = "->" if r.name == summary.recommended else ("* " if r.on_front else "  ")
        note = "" if r.within_budget or r.kind == "full" else "  over budget"
        if r.kind == "searched" and not r.on_front:
            note += f"  off the front on {'these prompts' if summary.prompted else 'this text'}"
        if r.stopped is not None:
            note += f"  {at_least(r)}"
        lines.append(
            f"{mark}{r.name:<22}{_level(r, w):>8}  {_interval(r.dnll_full):<26}{r.slots16:>10.1f}"
            f"{r.bytes_peak / 2**20:>8.2f}{r.tokens:>7}{note}"
        )
    lines += [*unit, "  -> recommended   * on the front", ""]
    if summary.recommended is not None:
        lines += _recommendation(summary.row(summary.recommended), summary)
    for c in summary.rechecks:
        if c == summary.against("method"):
            continue  # said above
        lines.append(
            f"  {c.policy} - {c.against} on {_on(c.text, summary)}: {_interval(c.dnll)} "
            f"(n = {c.tokens})"
        )
    counts = ", ".join(f"{n} {STATES.get(k, k)}" for k, n in sorted(summary.counts.items()))
    if summary.importances:
        top = [f"{k} {100 * v:.0f} %" for k, v in list(summary.importances.items())[:5]]
        lines.append(f"  axes that matter most around the best policies: {', '.join(top)}")
    tokens = sum(t.tokens for t in summary.trials)
    lines.append(f"  {len(summary.trials)} policies tried: {counts}")
    if absent := behind_text(summary.behind):
        lines.append(
            f"  not among the best on the search {w.material}, and not measured further "
            f"({w.loss} to the recommended policy there): {absent}"
        )
    if missing := left_out(summary):
        lines.append(f"  left out: {missing}; trials.jsonl has each reason in full")
    lines += [
        f"  {tokens:,} search tokens evaluated; {summary.seconds:.0f} s"
        + (" since the run was resumed" if summary.resumed else ""),
        "",
        f"report    {folder / 'report.html'}",
        f"front     {folder / 'front.csv'}",
        f"plot      {folder / 'pareto.html'}",
        f"policies  {folder / 'policies'}",
    ]
    if summary.recommended is not None:
        lines.append(f"best      {folder / 'best.json'}")
    return "\n".join(lines)


def standing(summary: Summary) -> list[str]:
    """What an unfinished run knows: the best policy so far, and the best of each kind beside it.

    Of rows that cannot be told apart yet, the order may still change.
    """
    if summary.recommended is None or not summary.rows:
        return []
    w, best = words_of(summary), summary.row(summary.recommended)
    where = text_part(summary, "report").name
    lines = [f"so far, {w.loss} to the full cache ({w.unit}, 95 %) on {where}:"]
    shown = {"recommended": best}
    for title, kind in (("best published", "method"), ("best combination", "combined")):
        rows = [r for r in summary.rows if r.kind == kind and r.within_budget and r != best]
        shown |= {title: min(rows, key=lambda r: r.nll)} if rows else {}
    for title, r in shown.items():
        d, at = r.dnll_full, f"{r.bytes_peak / 2**20:.2f} MiB"
        lines.append(f"  {title:<17}{r.name:<18}{_interval(d):<26}{at:>10}, n = {r.tokens}")
    return lines


def _on(text: str, summary: Summary) -> str:
    return "report prompts" if summary.prompted and text == REPORT else text


def _level(row: Row, words: Words) -> str:
    return f"{row.ppl:.3f}" if words is TEXT else words.level_of(row)[0]


def _recommendation(row: Row, summary: Summary) -> list[str]:
    budget = summary.settings["budget_slots"]
    lines = [f"For {budget:g} fp16 slots per layer: {row.name} - {describe(row.policy)}"]
    for k in row.workloads:
        full = next(x for x in summary.row("full").workloads if x.workload == k.workload)
        lines.append(
            f"  {k.workload}, question-{summary.settings['see']}: exact "
            f"{_percent(plain(k.exact))} % of {k.asks} answers, the full cache "
            f"{_percent(plain(full.exact))} % of {full.asks}; context lost "
            f"{_percent(plain(k.lost))} %"
        )
        kl = "" if k.kl is None else f", KL divergence {k.kl:.3f} nats a token"
        lines.append(f"    to the full cache: flips {100 * k.flips:.1f} % of answer tokens{kl}")
    best = summary.against("method")
    if best is not None:
        change = f"PPL {100 * (math.exp(best.dnll.mean) - 1):+z.1f} %, "
        unclear = best.dnll.lo <= 0 <= best.dnll.hi
        lines.append(
            f"  against the best published method, {best.against}: "
            f"{'' if summary.prompted else change}{words_of(summary).loss} {_interval(best.dnll)}"
            f"{' (no clear difference)' * unclear}, n = {best.tokens}"
        )
        if (d := summary.row(best.against).discordant) is not None:
            lines.append(
                f"  answers that only one of the two gives exactly: {d.only_recommended} by "
                f"{row.name}, {d.only_row} by {best.against} (McNemar's exact test, p = {d.p:.2g})"
            )
    if reached := sizes_text(summary):
        lines.append(f"  {reached}")
    if summary.needles is not None:
        lines.append(f"  {needles_text(summary)}")
    pairs = [(r.speed, r.decode.ratio) for r in summary.rows if r.decode and r.speed]
    if len(pairs) > 1:
        off = sorted(abs(modelled / measured - 1) for modelled, measured in pairs)
        lines.append(
            f"  decode speed over the full cache, modelled against measured: median error "
            f"{100 * off[len(off) // 2]:.0f} % over {len(pairs)} policies"
        )
    if row.decode is not None:
        lines.append("  " + bench_lines(row.name, row.decode).replace("\n", "\n  "))
    return lines


def results_table(document: dict[str, Any]) -> str:
    """The results of `kvsearch eval`."""
    lines = [
        f"{'policy':<22}{'PPL':>9}  {'dNLL to full (95 %)':<26}{'fp16 slots':>10}{'MiB':>8}{'s':>7}"
    ]
    for r in document["results"]:
        d = _interval(Interval(**r["dnll_full"]))
        over = "  over budget" if r["within_budget"] is False else ""
        lines.append(
            f"{r['policy']:<22}{r['ppl']:>9.3f}  {d:<26}{r['slots16']:>10.1f}"
            f"{r['bytes_peak'] / 2**20:>8.2f}{r['seconds']:>7.1f}{over}"
        )
    lines.append(
        f"n = {document['tokens']} tokens of {document['text']['name']}, scored from position "
        f"{document['score_from']} of {document['windows']} x {document['context']}; "
        "dNLL in nats/token"
    )
    lines += [f"left out: {name}: {why}" for name, why in document["left_out"].items()]
    return "\n".join(lines)


def answers_table(document: dict[str, Any]) -> str:
    """The results of `kvsearch eval` on prompts: one block a workload."""
    lines: list[str] = []
    for w in document["workloads"]:
        lines.append(
            f"{w['name']}, question-{w['see']}: {w['asks']} answers on {w['items']} contexts, up "
            f"to {w['tokens']} tokens; full cache exact {100 * w['full_exact']:.0f} %, NLL "
            f"{w['full']:.2f}, without the context {w['empty']:.2f}"
            + ("" if w["passes"] else "; NOT USABLE: this model does not need the context here")
        )
        lines.append(
            f"  {'policy':<20}{'context lost, % (95 %)':<26}{'exact, % (95 %)':<20}{'NLL':>6}"
            f"{'flips, %':>10}{'fp16 slots':>12}{'MiB':>8}{'s':>7}"
        )
        rows = [r for r in document["results"] if r["workload"] == w["name"]]
        for r in rows:
            over = "  over budget" if r["within_budget"] is False else ""
            lines.append(
                f"  {r['policy']:<20}{_percent(r['lost']):<26}{_percent(r['exact']):<20}"
                f"{r['nll']:>6.2f}{100 * r['flips']:>10.0f}{r['slots16']:>12.1f}"
                f"{r['bytes_peak'] / 2**20:>8.2f}{r['seconds']:>7.1f}{over}"
            )
        if kl := [f"{r['policy']} {r['kl']:.3f}" for r in rows if r["kl"] is not None]:
            lines.append(f"  KL divergence to the full cache, nats a token: {', '.join(kl)}")
    lines.append(
        "context lost: rise of the answers' NLL over the full cache, in shares of the rise without "
        "the context"
    )
    lines += [f"left out: {name}: {why}" for name, why in document["left_out"].items()]
    return "\n".join(lines)


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


def _interval(d: Interval) -> str:
    return str(d)
