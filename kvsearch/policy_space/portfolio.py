"""The portfolio: policies that earlier searches found, as points of the space, tried before others.

`portfolio.yaml` ships with the package; `studies/2026-11-text-and-facts` learned it, for texts and
for what is asked of them together.
"""

from pathlib import Path

from pydantic import ValidationError

from kvsearch.errors import SpaceError, quoted
from kvsearch.frozen import Frozen, first_error
from kvsearch.policy_space.axes import Value, check_value
from kvsearch.policy_space.methods import METHODS, Method
from kvsearch.policy_space.space import SearchSpace
from kvsearch.yaml_file import read_mapping

VERSION = 1
DEFAULT, NONE = "default", "none"

Portfolio = tuple[tuple[str, Method], ...]


class Point(Frozen):
    """A policy that an earlier search found.

    Attributes:
        name: in tables.
        source: the record that it came from.
        knobs: what differs from the defaults.
    """

    name: str
    source: str
    knobs: dict[str, Value]


class _File(Frozen):
    version: int
    about: str = ""
    points: tuple[Point, ...]


def load(where: str) -> dict[str, Method]:
    """The points of a portfolio by their names, in the order in which they are tried.

    Args:
        where: `default`, `none`, or a YAML file.

    Raises:
        SpaceError: it cannot be read, is of another version, or a field is wrong.
    """
    if where == NONE:
        return {}
    path = Path(__file__).with_name("portfolio.yaml") if where == DEFAULT else Path(where)
    data = read_mapping(path, "portfolio", SpaceError)
    if data.get("version") != VERSION:
        raise SpaceError(
            f"{path}: a portfolio of version {quoted(data.get('version'))}; this kvsearch reads "
            f"version {VERSION}: --portfolio none goes on without"
        )
    try:
        found = _File.model_validate(data)
    except ValidationError as e:
        raise SpaceError(f"{path}: {first_error(e, 'portfolio')}") from e
    except RecursionError as e:  # a list that an alias puts into itself
        raise SpaceError(f"{path}: nested too deeply for a portfolio") from e
    for i, point in enumerate(found.points):
        if point.name in METHODS or point.name in [p.name for p in found.points[:i]]:
            raise SpaceError(f"{path}: field points.{i}.name: {quoted(point.name)} is taken")
        for knob, value in point.knobs.items():
            if reason := check_value(knob, value):
                raise SpaceError(f"{path}: field points.{i}.knobs.{knob}: {reason}")
    return {p.name: Method(p.knobs, "earlier", p.source, baseline=False) for p in found.points}


def inside(known: dict[str, Method], space: SearchSpace) -> Portfolio:
    """Those that are points of `space`: a narrower one, such as a target's, may lack some."""
    return tuple((n, m) for n, m in known.items() if space.params(m.knobs) is not None)
