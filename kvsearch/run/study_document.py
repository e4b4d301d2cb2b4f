"""What a run asks, for its `study.json`, and the default folder that follows from it."""

import hashlib
import json
import platform
from importlib.metadata import version
from pathlib import Path

from kvsearch.models.load import LoadedModel
from kvsearch.options.budget import Budget
from kvsearch.options.run_config import RunConfig
from kvsearch.policy_space import SearchSpace, Setting
from kvsearch.results.study import Model, Settings, Study, Text, Texts
from kvsearch.session import make_windows


def study_of(
    options: RunConfig,
    loaded: LoadedModel,
    text: make_windows.MeasuredOn,
    setting: Setting,
    space: SearchSpace,
    *,
    budget: Budget,
    score_from: int,
    portfolio: list[str],
) -> Study:
    """What a run asks.

    Args:
        options: of the run.
        loaded: its model.
        text: its texts, or prompts.
        setting: tokens of a window, or of the longest prompt with its answer.
        space: its search space.
        budget: in both units.
        score_from: first scored position.
        portfolio: names of the policies of earlier searches that are evaluated first.
    """
    o, headline = options, len(text.parts["report"])
    model = {
        "name": loaded.name,
        "origin": loaded.origin,
        "digest": loaded.digest,
        "revision": loaded.revision,
        "dtype": loaded.dtype,
        "device": loaded.devices,
        "shape": loaded.shape.plain(),
    }
    settings = {
        "budget_slots": budget.slots,
        "budget_bytes": budget.bytes,
        "context": setting.tokens,
        "windows": o.searched,
        "report_windows": o.report_windows if o.windowed else text.report,
        **({"workloads": dict(text.weights)} if text.weights else {}),
        **({"left_out": dict(text.left_out)} if text.left_out else {}),
        **({"prompt": setting.prompt} if not o.windowed else {}),
        **({"headline_windows": headline} if headline > text.report else {}),
        "score_from": score_from,
        **({"portfolio": portfolio} if portfolio else {}),
        "extra_text": [t.token_sha256 for t in text.extra],
        "space": space.name,
        "space_digest": space.digest,
    }
    recorded = o.recorded()
    if not any(part.asks for part in text.parts.values()):
        recorded.pop("see", None)  # of facts that were left out
    packages = ("kvsearch", "torch", "transformers", "optuna")
    return Study(
        model=Model(**model),
        text=Texts(**{part: Text(**about) for part, about in text.described.items()}),
        settings=Settings(**recorded, **settings),
        options=o.plain(),
        trials=o.most_trials,
        versions={"python": platform.python_version(), **{p: version(p) for p in packages}},
    )


def default_folder(study: Study) -> Path:
    """A folder that is the same for the same command; another model, text or budget has another."""
    told = json.dumps(study.question, sort_keys=True)
    digest = hashlib.sha256(told.encode()).hexdigest()[:6]
    name = Path(study.model.name).name.removesuffix(".gguf")
    return Path("runs") / f"{name}-b{study.settings.budget_slots:g}-{digest}"
