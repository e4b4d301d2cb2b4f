"""What other installed packages add to our tables, found by entry points.

A package declares, say, `[project.entry-points."kvsearch.rules"]` with `value-norm =
"their_package.rules:ValueNorm"`; then the rule is known wherever ours are: on the command line, in
policy files, in processes that evaluate, and by Ray on every machine where the package is
installed.
"""

import warnings
from collections.abc import Callable, MutableMapping
from functools import cache
from importlib.metadata import entry_points
from multiprocessing import parent_process
from typing import Any

from kvsearch.errors import ExtensionWarning, one_line, quoted

_waiting: list[Callable[[], None]] | None = None  # while something is loaded: tables to go on with


def extend(
    table: MutableMapping[str, Any],
    group: str,
    wrong: Callable[[str, Any], str | None],
    *,
    by_name: bool = False,
) -> None:
    """Add what packages declare under `kvsearch.<group>`; what cannot be used is named.

    A package that is being loaded for one table may import the module of another table: that one is
    extended when the package is there as a whole.

    Args:
        table: ours, by name; its names are not replaced.
        group: `rules`, `samplers`, `tasks` or `targets`.
        wrong: what is wrong with an object of this name, or None.
        by_name: the table holds `module:attribute`, and not the objects.
    """
    global _waiting
    if _waiting is not None:
        _waiting.append(lambda: extend(table, group, wrong, by_name=by_name))
        return
    _waiting = []
    for point in _declared().select(group=f"kvsearch.{group}"):
        package = point.dist.name if point.dist is not None else point.module
        try:
            found = point.load()
            why = "the name is taken" if point.name in table else wrong(point.name, found)
        except Exception as e:  # whatever their module raises
            why = f"{type(e).__name__}: {e}"
        if why is None:
            table[point.name] = point.value if by_name else found
        elif parent_process() is None:  # said once, and not by every process that evaluates
            what = f"{quoted(point.name)} of the package {package} ({point.group})"
            warnings.warn(one_line(f"{what} is left out: {why}"), ExtensionWarning, stacklevel=3)
    waiting, _waiting = _waiting, None
    for go_on in waiting:
        go_on()


@cache
def _declared() -> Any:
    return entry_points()  # `EntryPoints`; with a group it would look through all packages again
