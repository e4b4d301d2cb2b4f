"""What a run leaves in its folder for people and for programs: report, tables and best policy."""

from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa

from kvsearch.files import write_atomic, write_parquet
from kvsearch.report import write_report
from kvsearch.results.records import Trial, columns
from kvsearch.results.summary import Summary


def write(summary: Summary, folder: Path) -> None:
    """Write the report, the policies and the tables of a run; nothing before there are rows."""
    if summary.rows:
        write_report(summary, folder)
        write_tables(summary, folder)


def write_tables(summary: Summary, folder: Path) -> None:
    """Write `trials.parquet` and, if one is recommended, `best.json`."""
    types = {f.name: _arrow(f.type) for f in fields(Trial)}
    found = columns(Trial, summary.trials)
    table = pa.table({name: pa.array(found[name], type=types[name]) for name in found})
    write_parquet(folder / "trials.parquet", table)
    if summary.recommended is not None:
        row = summary.row(summary.recommended)
        about = {
            "model": summary.model.name,
            "nll": row.nll,
            "dnll_full": row.dnll_full.mean,
            "bytes_peak": row.bytes_peak,
            "tokens": row.tokens,
        }
        best = row.policy.model_copy(update={"name": row.name, "about": about})
        write_atomic(folder / "best.json", best.to_json())
        if best.rule is not None and best.rule.files:
            from kvsearch.models.learned import beside  # loads torch

            best.rule.lies_in(folder)  # where an earlier report left them, perhaps elsewhere
            for name, data in beside(best).items():
                write_atomic(folder / name, data)


def _arrow(kind: Any) -> pa.DataType:
    """The type of a column, also where nothing in it is known; what is no number is text."""
    kinds = get_args(kind) or (kind,)
    return pa.int64() if int in kinds else pa.float64() if float in kinds else pa.string()
