"""`kvsearch report`."""

from pathlib import Path

import click

from kvsearch.cli.output import answer
from kvsearch.options.to_click import PLACE, output_options


@click.command("report")
@click.argument("run_dir", type=PLACE)
@output_options
def command(run_dir: Path, as_json: bool, quiet: bool) -> None:
    """Rebuild the report, the plots and the tables of a run from its records.

    Of a run that has not ended, they are of what is known by now.
    """
    from kvsearch.errors import RunError
    from kvsearch.options import study
    from kvsearch.report.terminal import closing
    from kvsearch.report.write import write
    from kvsearch.results.folder import RunFolder
    from kvsearch.run.summarise import Unfinished, read
    from kvsearch.run.unfinished import so_far

    if not run_dir.is_dir():
        raise RunError(f"there is no run folder {run_dir}")
    if not (run_dir / "study.json").exists():  # a folder of something else stays as it is
        raise RunError(f"{run_dir} holds no run: study.json is missing")
    folder = RunFolder(run_dir)
    try:
        try:
            summary = read(folder)
        except Unfinished:
            summary = so_far(folder, study.read(run_dir / "study.json"))
        write(summary, run_dir)
    finally:
        folder.close()
    answer(as_json, {"out": str(run_dir), **summary.document()}, closing(summary, run_dir))
