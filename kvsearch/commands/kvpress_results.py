"""Answers in the form of kvpress' evaluation: a folder with predictions, metrics and configuration.

Names of files, columns and options, and the score of RULER, are those of kvpress 0.5.5
(`evaluation/evaluate.py`, `evaluation/benchmarks/ruler/calculate_metrics.py`); nothing of kvpress
is needed. Other data sets have that score, too: their own need packages of kvpress' evaluation, and
read `predictions.csv`.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kvsearch.errors import KvsearchError
from kvsearch.evaluation.answers import spoken
from kvsearch.evaluation.evaluator import Evaluator
from kvsearch.files import csv_text, write_all
from kvsearch.policy import Policy
from kvsearch.workloads import TASKS, Ask, Prompts

MORE = 8  # tokens that an answer may have beyond its reference
COLUMNS = (
    "task", "question", "answer_prefix", "answer", "predicted_answer", "max_new_tokens",
    "compression_ratio",
)  # fmt: skip


@dataclass(frozen=True)
class Predicted:
    """What a policy answers to the asks of a workload.

    Attributes:
        dataset, data_dir: kvpress' names of the data; the second may be empty.
        policy: the policy.
        ratio: share of the full cache's bytes that it saves, at the peak of the longest item.
        rows: a mapping with `COLUMNS` for each ask.
    """

    dataset: str
    data_dir: str
    policy: Policy
    ratio: float
    rows: tuple[Mapping[str, Any], ...]


def require_prompts(workloads: Sequence[Prompts]) -> None:
    """Raise a `KvsearchError` for turns of a chat, which kvpress has no form for."""
    for workload in workloads:
        if any(ask.follows for item in workload.items for ask in item.asks):
            raise KvsearchError(
                f"{workload.name} has chats of several turns, and kvpress' results have none; "
                "leave it or --kvpress-out out"
            )


def predicted(
    evaluator: Evaluator,
    policy: Policy,
    workload: Prompts,
    ratio: float,
    progress: Callable[[], None],
) -> Predicted:
    """Generate the answers of a workload.

    Args:
        evaluator: of the model.
        policy: of the cache.
        workload: the prompts.
        ratio: see `Predicted`.
        progress: called after every item.
    """
    text, rows = evaluator.loaded.tokenizer.decode, list[dict[str, Any]]()
    task, dataset, data_dir = _names(workload)
    for item in workload.items:
        most = [_given(ask, "tokens") or ask.answer.size + MORE for ask in item.asks]
        found = spoken(evaluator, policy, item, workload.see, most)
        for ask, tokens, said in zip(item.asks, most, found, strict=True):
            answer = list(_given(ask, "answers") or _references(task, text(ask.answer)))
            question = _given(ask, "question")
            values = (
                _given(ask, "task") or task, text(ask.question) if question is None else question,
                _given(ask, "prefix") or "", answer, text(said, skip_special_tokens=True),
                tokens, ratio,
            )  # fmt: skip
            rows.append(dict(zip(COLUMNS, values, strict=True)))
        progress()
    return Predicted(dataset, data_dir, policy, ratio, tuple(rows))


def _given(ask: Ask, name: str) -> Any:
    """A field of the record that an ask was made of."""
    return getattr(ask.about, name, None)


def _names(workload: Prompts) -> tuple[str, str, str]:
    """Task, data set and its part, as kvpress names them: `ruler` and `4096`."""
    head, *rest = workload.name.split(",")
    name = head.partition(":")[0]
    if name not in TASKS:
        dataset, _, part = workload.name.removeprefix("hf:").partition(":")
        return Path(dataset).stem, Path(dataset).stem, part.replace("@", "-")
    options = dict(part.split("=") for part in rest)
    tokens = options.pop("tokens", str(TASKS[name].tokens))
    family, _, task = head.replace(":", "_").rpartition("/")
    more = "".join(f"_{k}{v}" for k, v in options.items())
    return f"{task}{more}", family or f"{task}{more}", tokens


def _references(task: str, answer: str) -> list[str]:
    """Values that are one reference here and several in RULER, whose order does not count."""
    if not re.match("niah|vt|cwe|fwe", task):
        return [answer.strip()]
    return [word for word in re.split(r",?\s+", answer.strip()) if not re.fullmatch(r"\d\.", word)]


def string_match(rows: Sequence[Mapping[str, Any]], *, every: bool) -> dict[str, dict[str, float]]:
    """RULER's score by task: in per cent, the references that occur, or whether one does.

    As kvpress has it: letters of either case, control characters left out of what was answered.

    Args:
        rows: see `Predicted`.
        every: count all references, but of tasks `qa_*`; elsewhere they are alternatives.
    """
    scores: dict[str, list[float]] = {}
    for row in rows:
        said = re.sub(r"[\x00-\x1f]", "", row["predicted_answer"].strip()).strip().lower()
        hits = [ref.lower() in said for ref in row["answer"]]
        part = not every or row["task"].split("_")[0] == "qa"
        scores.setdefault(row["task"], []).append(max(hits) if part else sum(hits) / len(hits))
    return {
        task: {"string_match": round(100 * sum(found) / len(found), 2)}
        for task, found in sorted(scores.items())
    }


def write(place: Path, model: str, device: str, see: str, found: Sequence[Predicted]) -> list[Path]:
    """Write a folder for each policy and data set below `place`; tasks of one set are together.

    Returns:
        the folders. One that exists is left, and a number is put below it, as kvpress does.

    Raises:
        RunError: they cannot be written.
    """
    sets: dict[tuple[str, str, str], list[Predicted]] = {}
    for one in found:
        sets.setdefault((one.dataset, one.data_dir, one.policy.name or ""), []).append(one)
    folders = []
    for (dataset, data_dir, name), mine in sets.items():
        rows = [row for one in mine for row in one.rows]
        ratio = round(min(one.ratio for one in mine), 4)
        config = _config(dataset, data_dir, model, device, see, mine[0].policy, ratio)
        parts = [
            dataset, data_dir, model.replace("/", "--"), name, f"{ratio:.2f}",
            "query_aware" if see == "aware" else "",
        ]  # fmt: skip
        folder = _free(place / "__".join(filter(None, parts)))
        files = {
            "predictions.csv": csv_text(rows, COLUMNS),
            "metrics.json": json.dumps(string_match(rows, every=dataset == "ruler"), indent=4),
            "config.yaml": yaml.safe_dump(config, indent=2, sort_keys=False),
        }
        write_all(folder, files)
        folders.append(folder)
    return folders


def _free(folder: Path) -> Path:
    number = 0
    place = folder
    while place.exists():
        number += 1
        place = folder / str(number)
    return place


def _config(
    dataset: str, data_dir: str, model: str, device: str, see: str, policy: Policy, ratio: float
) -> dict[str, Any]:
    """kvpress' `EvaluationConfig`; what says nothing about a policy has its default there."""
    return {
        "dataset": dataset, "data_dir": data_dir or None, "model": model, "device": device,
        "press_name": policy.name, "compression_ratio": ratio,
        "key_channel_compression_ratio": None, "head_compression_ratio": None, "threshold": None,
        "fraction": 1.0, "max_new_tokens": None, "max_context_length": None,
        "query_aware": see == "aware", "needle_depth": None, "compression_interval": None,
        "target_size": None, "hidden_states_buffer_size": None, "output_dir": "./results",
        "log_level": "INFO", "model_kwargs": {}, "trust_remote_code": False,
        "press_init_command": f"kvsearch {json.dumps(policy.plain())}", "seed": 42, "fp8": False,
    }  # fmt: skip
