"""What a training changed on held-out text, with paired intervals."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsearch.results.intervals import paired
from kvsearch.results.records import Interval

NLL = NDArray[np.float32]


@dataclass(frozen=True)
class Adapted:
    """What was trained and what that changed. NLL in nats per token of held-out text.

    Attributes:
        folder: the checkpoint, with `policy.json`; `losses.csv` has the loss of every step, and
            `nll.parquet` the losses of every held-out token.
        policy, fingerprint: what runs on the trained model.
        model: that was trained.
        trained: what of it.
        trained_numbers: how many numbers that is.
        steps, seconds: optimizer steps and time of training.
        text, held_out: names.
        windows, context: of held-out text.
        tokens: scored in it, `n` of every number.
        full_before: mean NLL of the given model, whole and with the full cache.
        before: of the model under the policy, before training.
        after: of the same after training.
        full_after: of the trained model with the full cache.
        gain: `after` minus `before`; below 0 is better.
        loss_before, loss_after: `before` and `after` minus `full_before`.
        cost: `after` minus `full_after`: what the policy costs the trained model.
        full_gain: `full_after` minus `full_before`: what the training text alone gave or took.
    """

    folder: str
    policy: str
    fingerprint: str
    model: str
    trained: str
    trained_numbers: int
    steps: int
    seconds: float
    text: str
    held_out: str
    windows: int
    context: int
    tokens: int
    full_before: float
    before: float
    after: float
    full_after: float
    gain: Interval
    loss_before: Interval
    loss_after: Interval
    cost: Interval
    full_gain: Interval

    def table(self) -> str:
        """For people."""
        of = self.policy
        rows = (
            ("full cache, before", self.full_before, None),
            (f"{of}, before", self.before, self.loss_before),
            (f"{of}, after", self.after, self.loss_after),
            ("full cache, after", self.full_after, self.full_gain),
        )
        wide = max(len(name) for name, *_ in rows) + 2
        lines = [f"{'':{wide}}{'NLL':>8}{'PPL':>10}  minus full before (95 %)"]
        for name, nll, d in rows:
            lines.append(f"{name:{wide}}{nll:>8.4f}{np.exp(nll):>10.3f}  {_words(d)}".rstrip())
        return "\n".join([
            *lines,
            f"training changed {of} by {_words(self.gain)}; it costs the trained model "
            f"{_words(self.cost)}",
            f"nats/token, n = {self.tokens} tokens of {self.held_out} in {self.windows} x "
            f"{self.context}",
            f"{self.steps} steps in {self.seconds:.0f} s: {self.trained}, {self.trained_numbers:,} "
            "numbers",
            f"{self.folder}: kvsearch eval {self.folder}/policy.json --model {self.folder}",
        ])  # fmt: skip


def compared(losses: Mapping[str, NLL], start: int) -> dict[str, Any]:
    """The figures of `Adapted`, from position `start` of every window on.

    Args:
        losses: nats per token `[W, T - 1]` by name: `full_before`, `before`, `after`, `full_after`.
        start: first scored position.
    """
    part = {name: nll[:, start - 1 :] for name, nll in losses.items()}
    return {
        "tokens": int(part["before"].size),
        **{name: float(nll.mean(dtype=np.float64)) for name, nll in part.items()},
        "gain": paired(part["after"], part["before"]),
        "loss_before": paired(part["before"], part["full_before"]),
        "loss_after": paired(part["after"], part["full_before"]),
        "cost": paired(part["after"], part["full_after"]),
        "full_gain": paired(part["full_after"], part["full_before"]),
    }


def _words(d: Interval | None) -> str:
    return "" if d is None else str(d)
