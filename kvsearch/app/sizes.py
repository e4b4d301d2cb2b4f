"""The same policy at other sizes: how much memory less gives the same loss."""

from collections.abc import Sequence
from dataclasses import replace

from kvsearch.errors import PolicyError
from kvsearch.knobs import Setting, build
from kvsearch.policy import Policy, check, layout
from kvsearch.records import Trial

SMALLER, LARGER = (0.25, 0.375, 0.5), (2.0, 3.0)  # shares of the budget


def resized(trial: Trial, setting: Setting, shares: Sequence[float]) -> list[Policy]:
    """A trial's policy in other shares of the budget, where it can be built so.

    What would take as much as the full cache is left out.

    Args:
        trial: with the knobs that it was built from.
        setting: of the run.
        shares: of the budget in bytes.
    """
    found, shape = list[Policy](), setting.shape
    full = layout(Policy(), shape).bytes_peak(setting.tokens, setting.prompt)
    for share in shares:
        room = int(share * (setting.budget_bytes or 0))
        if not 0 < room < full:
            continue
        try:
            name = f"{trial.name} x {share:g}"
            policy = build(trial.params, replace(setting, budget_bytes=room), name=name)
            check(policy, shape, prompt=setting.prompt)
        except PolicyError:
            continue
        found.append(policy)
    return found
