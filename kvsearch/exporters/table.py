"""The table of `docs/targets.md`, from the targets themselves.

`python -m kvsearch.exporters.table docs/targets.md` writes it anew.
"""

import re
import sys
from pathlib import Path

from kvsearch.exporters import TARGETS, find
from kvsearch.exporters.space import why_not
from kvsearch.exporters.target import Target
from kvsearch.files import write_atomic


def markdown() -> str:
    """One row per target."""
    rows = [
        "| target | runtime | executes | per layer | `run --target` | proof |",
        "|---|---|---|---|---|---|",
    ]
    rows += [_row(find(name)) for name in TARGETS]
    return "\n".join(rows) + "\n"


def _row(t: Target) -> str:
    return (
        f"| `{t.name}` | {t.runtime} {t.version} | {t.knobs} | {_layers(t)} | {_searched(t)} | "
        f"{t.proof} |"
    )


def _layers(t: Target) -> str:
    if t.executes is None:
        return "everything"
    kinds = {"alike": [], "exceptions": ["16 bits"], "ends": ["bits of both ends"]}
    words = kinds.get(t.executes.layers, ["bits"])
    if t.executes.eviction is not None and t.executes.eviction.budgets:
        words = [*words, "slots"]
    return ", ".join(words) or "no"


def _searched(t: Target) -> str:
    if why_not(t) is None:
        return "yes"
    reason = why_not(t, on_prompts=True)
    return "on prompts" if reason is None else f"no: {reason}"


def main() -> None:
    """Replace the table of the page that the first argument names."""
    page = Path(sys.argv[1])
    text = page.read_text(encoding="utf-8")
    between = re.compile(r"(<!-- table -->\n).*?(<!-- end -->)", re.S)
    write_atomic(page, between.sub(lambda m: m[1] + markdown() + m[2], text))


if __name__ == "__main__":
    main()
