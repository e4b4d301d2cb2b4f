"""One-at-a-time screening: every axis moved once, on the best policy so far.

Published methods never leave the defaults of some axes (rotation, budgets per layer): nothing they
show says what those are worth, and a model that has seen nothing there is as likely to stay away.
One move on every axis settles it for the price of about a dozen evaluations on a window each.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvsearch.policy_search.samplers.history import History
from kvsearch.policy_search.samplers.pool import Draw, values
from kvsearch.policy_search.samplers.pricing import Context, Priced
from kvsearch.policy_search.samplers.size_probes import AXIS as SIZE
from kvsearch.policy_search.samplers.surrogate import Surrogate
from kvsearch.policy_space import SearchSpace, Value


class Middle:
    """Draws the middle.

    A move may open further axes, such as the exponent of budgets per layer. Their ends are extreme;
    from the middle the parent gets a fair hearing.
    """

    def random(self) -> float:
        """Of a range."""
        return 0.5

    def choice(self, choices: Sequence[Any]) -> Any:
        """Of several."""
        return choices[len(choices) // 2]


def next_move(history: History, context: Context, model: Surrogate) -> Mapping[str, Value] | None:
    """The best policy, moved along one axis that no trial has moved alone; None when there is none.

    Of all such moves the one with the most to hope for: the least loss at one standard deviation
    below the mean. The next one starts from whatever is best then, and where a move has opened
    axes, those come too.
    """
    best = history.best()
    if not best:
        return None
    base, space = best[0].point.knobs, context.space
    done, others = [s.point for s in history.done], history.pending
    moves = []
    for axis in base:
        if axis == SIZE or axis not in space.axes or _moved(axis, done, others, space):
            continue
        for value in values(space.axes[axis], base[axis]):
            point = context.price(space.suggest(Draw({**base, axis: value}, Middle())))
            if point is not None and point.fingerprint not in history.tried:
                moves.append(point)
    if not moves:
        return None
    mean, std = model.predict(moves)
    return moves[int((mean - std).argmin())].knobs


def _moved(axis: str, done: Iterable[Priced], others: Iterable[Priced], space: SearchSpace) -> bool:
    """Whether two policies differ in this axis alone, apart from size and axes that depend on it.

    One of them has to be among `done`, the first: two that are both still evaluated do not show
    what the axis is worth.
    """
    free = {axis, SIZE} | space.opened_by(axis)
    seen: dict[frozenset[tuple[str, Value]], Value] = {}

    def known(point: Priced, keep: bool) -> bool:
        if axis not in point.knobs:
            return False
        rest = frozenset((k, v) for k, v in point.knobs.items() if k not in free)
        value = point.knobs[axis]
        return (seen.setdefault(rest, value) if keep else seen.get(rest, value)) != value

    return any(known(p, True) for p in done) or any(known(p, False) for p in others)
