"""Where to put names so that they cover neither each other nor the marks."""

from collections.abc import Iterator, Sequence

Box = tuple[float, float, float, float]  # left, bottom, right, top, in pixels

# Directions in order of preference; a front falls to the right, so up-right is usually free.
_WAYS = [(1, 1), (1, 0), (1, -1), (-1, -1), (-1, 1), (0, 1), (0, -1), (-1, 0)]
AROUND = (1.0, 1.8, 3.0, 4.5, 6.5, 9.0)  # units from a point to its label


def place(
    anchors: Sequence[tuple[float, float]],
    sizes: Sequence[tuple[float, float]],
    obstacles: Sequence[Box],
    bounds: Box,
    unit: float,
) -> list[Box | None]:
    """Choose a box for each label, in order.

    Args:
        anchors: points to name, pixels; earlier ones are placed first.
        sizes: width and height of each label.
        obstacles: boxes that no label may touch.
        bounds: labels stay inside.
        unit: smallest distance between a point and its label, pixels.

    Returns:
        A box a label, or None where every place nearby is taken.
    """
    taken = list(obstacles)
    out: list[Box | None] = []
    for anchor, size in zip(anchors, sizes, strict=True):
        found = next(
            (
                box
                for box in _candidates(anchor, size, unit)
                if _inside(box, bounds) and not any(_touch(box, other) for other in taken)
            ),
            None,
        )
        if found is not None:
            taken.append(found)
        out.append(found)
    return out


def gap(box: Box, anchor: tuple[float, float]) -> float:
    """Distance from a point to the nearest edge of a box; a long one needs a leader line."""
    dx = max(box[0] - anchor[0], 0.0, anchor[0] - box[2])
    dy = max(box[1] - anchor[1], 0.0, anchor[1] - box[3])
    return float((dx * dx + dy * dy) ** 0.5)


def _candidates(
    anchor: tuple[float, float], size: tuple[float, float], unit: float
) -> Iterator[Box]:
    (x, y), (w, h) = anchor, size
    for far in AROUND:
        for sx, sy in _WAYS:
            d = unit * far * (0.7 if sx and sy else 1.0)
            left = x + d if sx > 0 else x - d - w if sx < 0 else x - w / 2
            low = y + d if sy > 0 else y - d - h if sy < 0 else y - h / 2
            yield left, low, left + w, low + h


def _inside(box: Box, bounds: Box) -> bool:
    return (
        box[0] >= bounds[0] and box[1] >= bounds[1] and box[2] <= bounds[2] and box[3] <= bounds[3]
    )


def _touch(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
