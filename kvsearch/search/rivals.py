"""The finished trials of a run as opponents in a race, their losses kept in memory."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvsearch.records import Trial
from kvsearch.search import race


class Rivals:
    """Opponents of one run.

    Args:
        score_from: first scored position.
        load: NLL `[W, T - 1]` of a measured policy by its fingerprint.
    """

    def __init__(self, score_from: int, load: Callable[[str], NDArray[np.float32]]) -> None:
        self._score_from, self._load = score_from, load
        self._known: dict[str, race.Rival] = {}

    def verdict(
        self, trial: Trial, nll: NDArray[np.float32], trials: Sequence[Trial]
    ) -> str | None:
        """Why a trial with this NLL on the first windows can be stopped, or None.

        Only those that use no more bytes, and are modelled no slower, may stop it.
        """
        rivals = [
            self._rival(t)
            for t in trials
            if t.state == "complete"
            and (t.bytes_peak or 0) <= (trial.bytes_peak or 0)
            and (t.speed or 0.0) >= (trial.speed or 0.0)
        ]
        return race.verdict(nll, rivals, score_from=self._score_from)

    def _rival(self, t: Trial) -> race.Rival:
        if t.fingerprint not in self._known:
            self._known[t.fingerprint] = race.Rival(t.name, self._load(t.fingerprint))
        return self._known[t.fingerprint]
