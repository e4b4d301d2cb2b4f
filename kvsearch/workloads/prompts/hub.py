"""Sets of prompts on the Hugging Face hub, with the fields of kvpress: `ruler:4096`."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from kvsearch.errors import TextError, nearest, quoted
from kvsearch.workloads.text.datasets import Dataset, rows, why

# What kvpress evaluates on; the configuration is the one where none is given.
PROMPT_SETS: Mapping[str, Dataset] = MappingProxyType(
    {
        "ruler": Dataset("simonjegou/ruler", "4096", "test", stream=False),
        "loogle": Dataset("simonjegou/loogle", "shortdep_qa", "test", stream=False),
        "longbench": Dataset("Xnhyacinth/LongBench", "hotpotqa", "test", stream=False),
        "longbench-v2": Dataset("simonjegou/LongBench-v2", "0shot", "test", stream=False),
        "infinitebench": Dataset(
            "MaxJeblick/InfiniteBench", "longbook_qa_eng", "test", stream=False
        ),
    }
)
_SPEC = re.compile(r"(?P<own>hf:)?(?P<name>[^:@]+)(:(?P<config>[^:@]+))?(@(?P<split>[^:@]+))?")


def named(spec: str) -> Dataset | None:
    """The set that `NAME[:CONFIG][@SPLIT]` or `hf:OWNER/NAME[:CONFIG][@SPLIT]` means, or None.

    Raises:
        TextError: `hf:` is followed by something else.
    """
    found = _SPEC.fullmatch(spec)
    if spec.startswith("hf:") and (found is None or found["name"].count("/") != 1):
        raise TextError(f"{quoted(spec)} is no data set: give hf:OWNER/NAME[:CONFIG][@SPLIT]")
    if found is None or not (found["own"] or found["name"] in PROMPT_SETS):
        return None
    if found["own"]:
        known = Dataset(found["name"], None, "test", stream=False)
    else:
        known = PROMPT_SETS[found["name"]]
    return replace(known, config=found["config"] or known.config,
                   split=found["split"] or known.split)  # fmt: skip


def hint(spec: str) -> str:
    """What to give instead of a name that is neither a file nor a set."""
    return nearest(spec.partition(":")[0], PROMPT_SETS)


def numbered(spec: Dataset) -> Iterator[tuple[str, Any]]:
    """Rows with where each is, for messages.

    The answers of `PROMPT_SETS` are references, without the space that stands before an answer.

    Raises:
        TextError: the set is neither cached nor reachable.
    """
    where = " ".join(filter(None, (spec.repo, spec.config, spec.split)))
    try:
        found = rows(spec)
        bare = any(spec.repo == known.repo for known in PROMPT_SETS.values())
        for i, row in enumerate(found, 1):
            yield f"{where}: row {i}", {**row, "answer_gap": _gap(row)} if bare else row
    except Exception as error:  # of every HTTP and file library below `datasets`
        raise TextError(
            f"data set {where} cannot be fetched: {why(error)}; give a file of prompts"
        ) from error


def _gap(row: Mapping[str, Any]) -> str:
    """A space, but after one, and in languages without."""
    before = "".join(str(row.get(x) or "") for x in ("context", "question", "answer_prefix"))
    return " " if before[-1:].isascii() and not before[-1:].isspace() else ""
