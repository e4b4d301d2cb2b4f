"""The finished trials of a run as opponents in a race, their losses kept in memory."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvsearch.policy import ModelShape
from kvsearch.records import Trial
from kvsearch.search import race


class Rivals:
    """Opponents of one run.

    Args:
        shape: of the model.
        score_from: first scored position.
        tokens: of a whole window.
        load: NLL `[W, T - 1]` of a measured policy by its fingerprint.
    """

    def __init__(
        self,
        shape: ModelShape,
        score_from: int,
        tokens: int,
        load: Callable[[str], NDArray[np.float32]],
    ) -> None:
        self._shape, self._score_from, self._tokens, self._load = shape, score_from, tokens, load
        self._known: dict[str, race.Rival] = {}

    def verdict(
        self, trial: Trial, nll: NDArray[np.float32], trials: Sequence[Trial]
    ) -> str | None:
        """Why a trial with this NLL on a prefix can be stopped, or None.

        Only those that use no more bytes, and are modelled no slower, may stop it.
        """
        rivals = [
            self._rival(t)
            for t in trials
            if t.state == "complete"
            and (t.bytes_peak or 0) <= (trial.bytes_peak or 0)
            and (t.speed or 0.0) >= (trial.speed or 0.0)
        ]
        mine = race.exposure(trial.policy, self._shape)
        return race.verdict(nll, mine, rivals, score_from=self._score_from, tokens=self._tokens)

    def _rival(self, t: Trial) -> race.Rival:
        if t.fingerprint not in self._known:
            seen = race.exposure(t.policy, self._shape)
            self._known[t.fingerprint] = race.Rival(t.name, seen, self._load(t.fingerprint))
        return self._known[t.fingerprint]
