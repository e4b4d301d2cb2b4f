"""The card of a shared policy: what it was found on, what it costs, and where it runs."""

import json
from dataclasses import dataclass
from typing import Any

from kvsearch.models.aliases import hub_id
from kvsearch.policy import Policy
from kvsearch.report import facts
from kvsearch.report.describe import describe
from kvsearch.report.tables import bytes_text, interval_text
from kvsearch.report.words import words_of
from kvsearch.results.records import Recheck, Row
from kvsearch.results.summary import Summary

_USE = """\
```python
from kvsearch import PolicyCache, load_model

loaded = load_model("{model}")
cache = PolicyCache.from_pretrained("{name}", loaded.model, tokenizer=loaded.tokenizer)
ids = loaded.tokenizer("The lighthouse keeper", return_tensors="pt")
out = loaded.model.generate(**ids, past_key_values=cache, max_new_tokens=64)
```
"""

_CODE = """\
Without a line of kvsearch, which has to be installed (transformers runs code from here):

```python
out = model.generate(
    **ids, custom_generate="{name}", trust_remote_code=True, tokenizer=tokenizer
)
```
"""

_HEADS = (
    "`heads.json` is what each KV head of this model loses, measured once: `kvsearch run`, `eval` "
    "and `bench` take it with `--heads heads.json`, for any budget and text."
)


@dataclass(frozen=True)
class Proven:
    """A runtime that runs the policy exactly as it is.

    Attributes:
        target: its name in `kvsearch targets`.
        version: with the name of the project.
        proof: how far exports to it are proven.
    """

    target: str
    version: str
    proof: str


def card(
    name: str,
    policy: Policy,
    model: str | None,
    found: tuple[Summary, Row] | None,
    exact: list[Proven],
    *,
    heads: bool = False,
    code: bool = False,
) -> str:
    """Markdown with the front matter that the hub reads.

    Args:
        name: hub id, or folder.
        policy: what is shared.
        model: name of the model, if it is known.
        found: the run that measured it, and its row; None: it was not measured.
        exact: runtimes that run it exactly.
        heads: whether what the model's KV heads lose lies beside it.
        code: whether code that `generate` takes from a repository does.
    """
    front = ["---", "library_name: kvsearch", "tags: [kvsearch, kv-cache]"]
    base = hub_id(model or "")
    if "/" in base and not base.startswith((".", "/", "~")):
        front.append(f"base_model: {base}")
    lines = [
        *front,
        "---",
        "",
        f"# {name.rsplit('/', 1)[-1]}",
        "",
        f"A KV-cache policy. {describe(policy)}",
        "",
    ]
    if found is None:
        lines += ["It was not measured: no run of kvsearch lies beside it.", ""]
    else:
        lines += _figures(*found)
    lines += ["## Use", "", _USE.format(model=model or "MODEL", name=name)]
    if code:
        lines += [_CODE.format(name=name)]
    if heads:
        lines += [_HEADS, ""]
    lines += _runs(exact)
    lines += ["## Policy", "", "```json", policy.to_json().strip(), "```", ""]
    return "\n".join(lines)


def _figures(summary: Summary, row: Row) -> list[str]:
    full, w = summary.row("full"), words_of(summary)
    rows: list[tuple[str, str]] = [
        ("model", f"{summary.model.name} ({summary.model.digest})"),
        (
            w.material,
            f"{facts.text_name(summary)}, {row.tokens:,} {w.count}, not seen by the search",
        ),
        (
            w.longest,
            f"{summary.settings.context:,} tokens",
        ),
        ("budget", f"{bytes_text(summary.budget_bytes)} per sequence"),
        ("peak bytes", f"{row.bytes_peak:,} per sequence ({row.slots16:.1f} fp16 slots a layer)"),
        (w.level, " ".join(w.level_of(row))),
        (f"{w.loss} to the full cache", f"{interval_text(row.dnll_full)} {w.unit}"),
        ("full cache", f"{w.level} {w.level_of(full)[0]}, {bytes_text(full.bytes_peak)}"),
    ]
    if (best := _best(summary, row)) is not None:
        said = f"{interval_text(best.dnll)} {w.unit}, {best.tokens:,} {w.count}"
        rows.append((f"{w.loss} to the best published method ({best.against})", said))
    versions = summary.study.versions.items()
    rows.append(("versions", ", ".join(f"{k} {v}" for k, v in versions)))
    table = ["| what | value |", "|---|---|", *(f"| {a} | {b} |" for a, b in rows)]
    return ["## Figures", "", "95 % intervals in brackets.", "", *table, ""]


def _best(summary: Summary, row: Row) -> Recheck | None:
    """The recommended policy against the best published method, as at the head of the report."""
    return summary.against("method") if row.name == summary.recommended else None


def _runs(exact: list[Proven]) -> list[str]:
    head = [
        "## Where it runs exactly as it is",
        "",
        "| target | runtime | proof |",
        "|---|---|---|",
    ]
    return [*head, *(f"| `{p.target}` | {p.version} | {p.proof} |" for p in exact), ""]


def document(
    policy: Policy, model: str | None, found: tuple[Summary, Row] | None, exact: list[Proven]
) -> str:
    """The same figures as JSON."""
    out: dict[str, Any] = {
        "schema": "kvsearch.card/1",
        "policy": policy.plain(),
        "fingerprint": policy.fingerprint(),
        "model": model,
        "exact": [p.__dict__ for p in exact],
        "measured": None,
    }
    if found is not None:
        summary, row = found
        best = _best(summary, row)
        out["model"] = {
            k: getattr(summary.model, k) for k in ("name", "digest", "revision", "dtype")
        }
        out["measured"] = {
            "text": summary.text.report.plain(),
            "context": summary.settings.context,
            "budget_bytes": summary.budget_bytes,
            "tokens": row.tokens,
            "ppl": row.ppl,
            "nll": row.nll,
            "nll_se": row.nll_se,
            "dnll_full": row.dnll_full.__dict__,
            "dnll_best": best
            and {"best": best.against, **best.dnll.__dict__, "tokens": best.tokens},
            "bytes_peak": row.bytes_peak,
            "versions": summary.study.versions,
        }
    return json.dumps(out, indent=1) + "\n"
