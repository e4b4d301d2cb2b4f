"""`kvsearch export`."""

from math import exp, expm1, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from kvsearch.cli.output import answer
from kvsearch.errors import RunError
from kvsearch.options.other_commands import ExportConfig
from kvsearch.options.to_click import PLACE, options, output_options

if TYPE_CHECKING:
    from kvsearch.commands.exported import Exported
    from kvsearch.results.records import Interval


@click.command("export")
@click.argument("policy", type=PLACE)
@options(ExportConfig)
@output_options
def command(policy: Path, to: str, as_json: bool, quiet: bool, **given: Any) -> None:
    """Write what a runtime needs to run POLICY, and say what it cannot do.

    POLICY is a policy file, or a folder with one: a run folder's is its recommended policy. It may
    also be the name of a method (`kvsearch methods`), with --budget and --model.
    `kvsearch targets` lists the runtimes. `--to vectors` writes what a runtime of your own must
    compute under POLICY, and `--to optuna`, of a run folder, its trials for optuna-dashboard.
    """
    from kvsearch.exporters import OTHERS, find
    from kvsearch.policy import Policy
    from kvsearch.session.policies import is_method

    if to not in OTHERS:
        find(to, OTHERS)
    if to != "optuna":  # which is of a run folder
        if policy.is_dir():
            from kvsearch.models.shared import policy_file

            policy = policy_file(str(policy))
        if to in OTHERS or not is_method(policy):
            Policy.from_json(policy)  # mistakes show before torch is loaded
    if to in OTHERS:
        from kvsearch.commands.vectors_and_storage import write_other

        _require_taken(to)
        how = {name: given[name] for name in ("out", "force", "prompt")}
        files = [str(f) for f in write_other(policy, to, **how)]
        answer(as_json, {"files": files}, "\n".join(files))
        return
    from kvsearch.commands.export import export
    from kvsearch.exporters.proof import TOLERANCE

    done = export(policy, to, **given, progress=not quiet)
    answer(as_json, done.document(), _table(done))
    if done.loss is not None and done.loss.agrees is False:
        raise RunError(
            f"the PPL in {done.target.runtime} is not within {100 * TOLERANCE:g} % of what is "
            "predicted; compare on more text, and report it with the table above"
        )


def _require_taken(target: str) -> None:
    """Refuse options for runtimes, where something is written for none."""
    given = click.get_current_context()
    takes = ["out", "force"] + ["prompt"] * (target == "vectors")
    for name in given.params:
        here = given.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if here and name not in (*takes, "policy", "to", "as_json", "quiet"):
            words = ", ".join(f"--{t}" for t in takes)
            raise click.UsageError(f"--{name} is for runtimes; --to {target} takes {words}")


def _table(done: "Exported") -> str:
    from kvsearch.exporters import PROOFS
    from kvsearch.exporters.fields import field_text
    from kvsearch.exporters.proof import TOLERANCE

    t, loss = done.target, done.loss
    rows = [("field", "asked", "given", "")]
    rows += [(v.field, field_text(v.asked), field_text(v.given), v.verdict) for v in done.verdicts]
    if done.bytes_asked is not None:
        sizes = f"{done.bytes_asked:,}", f"{done.bytes_given:,}"
        rows.append(("peak bytes", *sizes, f"of {done.tokens:,} tokens"))
    if loss is not None:
        where = f"{loss.tokens:,} tokens of {loss.text}"
        rows.append(("NLL", f"{loss.asked:.4f}", f"{loss.given:.4f}", where))
        rows.append(("PPL", f"{exp(loss.asked):.3f}", f"{exp(loss.given):.3f}", ""))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = [f"{t.runtime} {t.version}, proof {done.proof}: {PROOFS[done.proof]}"]
    lines += [
        "  ".join([*(x.ljust(w) for x, w in zip(row[:3], widths, strict=True)), row[3]]).rstrip()
        for row in rows
    ]
    if loss is not None and loss.runtime is not None and loss.ppl_off is not None:
        word = "agrees (within" if loss.agrees else "DIFFERS (not within"
        lines.append(
            f"in {t.runtime}: NLL {loss.runtime:.4f}, PPL {100 * loss.ppl_off:+.3f} % from the "
            f"policy given{_span(loss.off)}; {word} {100 * TOLERANCE:g} %)"
        )
    lines += [f"in {t.runtime}: {name} {value:,}" for name, value in done.measured.items()]
    lines += [f"note: {note}" for note in done.notes]
    lines += map(str, done.files)
    if done.answers is not None:
        from kvsearch.report.terminal import results_table

        lines.append(results_table(done.answers.document()))
    return "\n".join(lines)


def _span(off: "Interval | None") -> str:
    """A difference of NLL as one of PPL, in percent."""
    if off is None or not isfinite(off.lo):
        return ""
    return f" ({100 * expm1(off.lo):+.3f} to {100 * expm1(off.hi):+.3f})"
