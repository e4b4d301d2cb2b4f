"""Decode speed in a run: what is measured, and the model that a search may use instead."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvsearch.errors import PolicyError, TextError
from kvsearch.evaluation import decode_speed, throughput
from kvsearch.files import write_atomic
from kvsearch.models.load import LoadedModel
from kvsearch.policy import Policy
from kvsearch.policy_space import Setting
from kvsearch.policy_space.methods import at
from kvsearch.results.records import Throughput
from kvsearch.session.progress import Shown

STEPS = 16
PROBES = ("streamingllm", "h2o", "snapkv", "window+int4", "h2o+int4", "xmu", "h2o+int4-fine")


def steps(policy: Policy) -> int:
    """Tokens of one half of a pair: at least a whole interval, so that compactions are timed."""
    return max(STEPS, min(policy.interval, 64))


def pairs(n: int) -> int:
    """Pairs of `n` tokens each: five short ones, or three that hold a long interval."""
    return max(3, 80 // n)


def measure(
    loaded: LoadedModel, policy: Policy, ids: NDArray[np.int64], shown: Shown, title: str
) -> Throughput | None:
    """Decode speed of a policy as near to the end of `ids` as fits; None if they are too few."""
    n = steps(policy)
    context = len(ids) - throughput.needed(0, pairs(n), n)
    if context < 1:
        return None
    with shown.step(title, pairs(n)) as step:
        return throughput.measure(
            loaded, policy, ids, context=context, pairs=pairs(n), steps=n,
            progress=lambda _: step.advance(),
        )  # fmt: skip


def model(
    loaded: LoadedModel, setting: Setting, ids: NDArray[np.int64], folder: Path, shown: Shown
) -> decode_speed.SpeedModel:
    """The speed model of a run: measured once with a few methods, then kept in `decode_speed.json`.

    Raises:
        TextError: a window is too short to time anything.
    """
    file = folder / "speed.json"
    context = len(ids) - throughput.needed(0, pairs(64), 64)
    if context < 64:
        raise TextError("timing needs windows of at least 260 tokens; raise --context")
    if file.exists():
        kept = json.loads(file.read_text(encoding="utf-8"))
        return decode_speed.SpeedModel(
            tuple(kept["seconds"]), kept["context"], loaded.shape, kept["error"], kept["probes"]
        )
    probes = []
    for name in PROBES:
        try:
            probes.append(at(name, setting))
        except PolicyError:  # too large for this budget
            continue
    with shown.step("speed model", len(probes)) as step:

        def pair(policy: Policy) -> tuple[float, float]:
            found = throughput.measure(
                loaded, policy, ids, context=context, pairs=pairs(64), steps=steps(policy)
            )
            step.advance(1, policy.name or "")
            return 1 / found.tokens_per_s, 1 / found.full_tokens_per_s

        fitted = decode_speed.fit(probes, pair, loaded.shape, context)
    kept = {k: v for k, v in asdict(fitted).items() if k != "shape"}
    about = {
        "unit": "seconds per unit of work",
        "parts": decode_speed.PARTS,
        "device": loaded.device,
    }
    write_atomic(file, json.dumps({**about, **kept}) + "\n")
    shown.say(
        f"speed model: fitted to {fitted.probes} policies at {context} tokens, median error "
        f"{100 * fitted.error:.0f} %"
    )
    return fitted
