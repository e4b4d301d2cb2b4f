"""The options of a run, read back from its `study.json`."""

from dataclasses import fields
from pathlib import Path

from kvsearch.errors import KvsearchError, RunError
from kvsearch.options.run_config import RunConfig
from kvsearch.results.study import Study
from kvsearch.workloads.measured_parts import TEXT


def config_of(study: Study) -> RunConfig:
    """The options of a run; of those that an older version did not record, what they came to.

    Raises:
        KvsearchError: one is unknown, or out of range.
    """
    names = {f.name for f in fields(RunConfig) if "recorded" in f.metadata}
    recorded = {k: v for k, v in study.settings.plain().items() if k in names}
    s, known = study.settings, study.options
    if "options" not in study.model_fields_set:
        known = {"budget_slots": s.budget_slots, "context": s.context}
        known |= {"score_from": s.score_from, "report_windows": s.report_windows}
    if not s.workloads and s.see is None:  # an older run does not say so
        known = {"text_only": True, **known}
    elif not s.workloads and ("text" in known or "dataset" in known):
        known = {"weight": [f"{TEXT}=0"], **known}
    return RunConfig.read({**known, **recorded})


def read(file: Path) -> Study:
    """A `study.json` whose options are known.

    Raises:
        FileNotFoundError: there is none.
        RunError: it is damaged, or another version of kvsearch wrote it.
    """
    found = Study.read(file)
    try:
        config_of(found)
    except (KvsearchError, TypeError) as e:
        raise RunError(f"{file} is of a run that this kvsearch cannot read: {e}") from e
    return found
