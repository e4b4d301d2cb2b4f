"""Named datasets from the Hugging Face hub, as one text each."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvsearch.errors import TextError, nearest, quoted
from kvsearch.workloads.text.source import Source

LIMIT = 8_000_000  # characters, about 2 M tokens


@dataclass(frozen=True)
class Dataset:
    """Where a dataset is and how its rows become one text.

    Attributes:
        repo: on the hub.
        config: the subset, or None.
        split: the one that papers report on.
        field: of a row, with its text.
        join: between two rows.
        stream: fetch rows as they are needed, for sets that are much larger than `LIMIT`.
        revision: of the repository, or None for its main branch.
    """

    repo: str
    config: str | None
    split: str
    field: str = "text"
    join: str = "\n\n"
    stream: bool = True
    revision: str | None = None


# WikiText's rows are lines with their line ends, so that joining them with nothing gives the text
# back. Its two sizes have one and the same test split. PTB's rows are sentences; its repository
# still holds a loading script, which `datasets` no longer runs, next to the hub's own conversion.
DATASETS: Mapping[str, Dataset] = MappingProxyType(
    {
        "wikitext2": Dataset(
            "Salesforce/wikitext", "wikitext-2-raw-v1", "test", join="", stream=False
        ),
        "wikitext103": Dataset(
            "Salesforce/wikitext", "wikitext-103-raw-v1", "test", join="", stream=False
        ),
        "pg19": Dataset("emozilla/pg19", None, "test"),
        "ptb": Dataset(
            "ptb-text-only/ptb_text_only",
            "penn_treebank",
            "test",
            field="sentence",
            join=" ",
            stream=False,
            revision="refs/convert/parquet",
        ),
        "c4": Dataset("allenai/c4", "en", "validation"),
        "fineweb-edu": Dataset("HuggingFaceFW/fineweb-edu", "sample-10BT", "train"),
        "tinystories": Dataset("roneneldan/TinyStories", None, "validation"),
        "python": Dataset("codeparrot/codeparrot-clean-valid", None, "train", field="content"),
    }
)


def read_dataset(
    name: str, *, limit: int = LIMIT, announce: Callable[[str], None] | None = None
) -> Source:
    """The text of a named dataset, whole rows up to `limit` characters.

    Args:
        name: a key of `DATASETS`.
        limit: characters; the row that crosses it is cut there, so one long book cannot exceed it.
        announce: called with a sentence before anything is fetched.

    Raises:
        TextError: the name is unknown, or the dataset is neither cached nor reachable.
    """
    if name not in DATASETS:
        raise TextError(
            f"unknown dataset {quoted(name)}{nearest(name, DATASETS)}; or give --text FILE"
        )
    spec = DATASETS[name]
    if announce:
        announce(f"dataset {name}: fetching {spec.repo} ({spec.split}) unless it is cached")
    try:
        text = _joined((row[spec.field] for row in rows(spec)), spec.join, limit)
    # The errors of `datasets` are those of every HTTP and file library below it.
    except Exception as error:
        raise TextError(
            f"dataset {name} ({spec.repo}) cannot be fetched: {why(error)}; "
            "give a text of your own with --text FILE"
        ) from error
    what = f"{spec.repo} {spec.config or ''}".strip()
    return Source.of(
        f"{name}/{spec.split}", text, f"text: {what}, {spec.split} split, {len(text):,} characters"
    )


def why(error: Exception) -> str:
    """The first line of what `datasets`, or a library below it, says."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def rows(spec: Dataset) -> Iterable[Mapping[str, Any]]:
    """Rows of a dataset, from the hub or from the cache of `datasets`."""
    import datasets
    from huggingface_hub import HfApi

    # `datasets` retries for 23 s before it says that there is no network; this asks once.
    try:
        HfApi().dataset_info(spec.repo, timeout=20)
    except Exception:
        cached = Path(datasets.config.HF_DATASETS_CACHE) / spec.repo.replace("/", "___")
        if spec.stream or not cached.exists():
            raise
    found: Iterable[Mapping[str, Any]] = datasets.load_dataset(
        spec.repo, spec.config, split=spec.split, streaming=spec.stream, revision=spec.revision
    )
    return found


def _joined(texts: Iterable[str], join: str, limit: int) -> str:
    taken: list[str] = []
    size = 0
    for row in texts:
        taken.append(row)
        size += len(row) + len(join)
        if size >= limit:
            break
    return join.join(taken)[:limit]
