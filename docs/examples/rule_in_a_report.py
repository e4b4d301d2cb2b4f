# %% [markdown]
"""# Add a rule, and see it in a report.

A rule ranks the slots of a layer; a search decides how many stay, when, and in how many bits. Here
one that keeps large values is searched beside H2O, and gets a row of the same report.

    python docs/examples/rule_in_a_report.py            # SmolLM2-135M, minutes
    python docs/examples/rule_in_a_report.py --smoke    # a tiny random model, seconds
"""

# %% The rule: a function of the slots, known before anything asks which rules there are
from pathlib import Path
from tempfile import mkdtemp

from kvsearch.rules import RULES, ranked_by


def value_norm(slots):
    """`||v||_2` per slot `[B, H, N]`; higher stays."""
    return slots.read()[1].float().norm(dim=-1)


RULES["value-norm"] = ranked_by(value_norm, needs={"values"})

# %% [markdown]
# In a package of yours, an entry point of the group `kvsearch.rules` takes the place of that line,
# and `kvsearch run --space mine.yaml` knows the rule.

# %% The space: which rules and sizes a search may combine
from tiny import SMOKE, text, tiny  # noqa: E402

import kvsearch  # noqa: E402

folder = Path(mkdtemp(prefix="kvsearch-"))
space = folder / "mine.yaml"
space.write_text(
    "version: 2\nname: mine\naxes:\n"
    "  rule: {choice: [value-norm, h2o]}\n"
    "  interval: {choice: [16, 32]}\n"
    "  recent_window: {choice: [16, 32]}\n"
    "  tiers: {choice: ['16', k4v4]}\n"
)

# %% A point of it with a name of its own, which is measured first
portfolio = folder / "portfolio.yaml"
portfolio.write_text(
    "version: 1\npoints:\n"
    "- {name: my value norm, source: this page, knobs: {rule: value-norm, interval: 16, "
    "recent_window: 16}}\n"
)

# %% The run
if SMOKE:
    size = dict(budget_slots=48, context=192, trials=1, bench=False, text_only=True)
    model, words = tiny(), text()
else:
    size, model, words = dict(budget_slots=256), "smollm2-135m", None
found = kvsearch.search(
    model, words, space=str(space), portfolio=str(portfolio), out=folder / "run",
    progress=not SMOKE, **size,
)  # fmt: skip

# %% Its row, beside the published methods; the page has it in words and pictures
for row in found.summary.rows:
    print(f"{row.name:<22}{row.kind:<10}{row.bytes_peak:>10} bytes  dNLL {row.dnll_full}")
mine = found.summary.row("my value norm")
print("open", found.folder / "report.html", "for", mine.policy.rule.name)
