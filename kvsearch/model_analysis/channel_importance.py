"""How much each channel of a head matters, by its weights or by their gradients (KVPruner).

A channel's slice is its row of the query, key and value projections and its column of the output
projection: L1 sums |w| over it, L2 sums w^2, Taylor sums |w dL/dw| with L the loss on a text.
Queries and outputs are averaged over the query heads of a KV head, since what is removed is
removed from all of them; else they would outweigh keys and values by the size of the group.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from kvsearch.models.disk_cache import remembered
from kvsearch.models.load import LoadedModel
from kvsearch.models.projections import Projections, projections
from kvsearch.policy import ModelShape
from kvsearch.policy.pruning import Orders, tuples

ROW = 128  # tokens of a row of text that Taylor's loss is taken over
ROWS = 16  # such rows, at most

_OF: dict[str, Callable[[Tensor, Tensor | None], Tensor]] = {
    "l1": lambda w, _: w.abs(),
    "l2": lambda w, _: w.square(),
    "taylor": lambda w, g: torch.zeros_like(w) if g is None else (w * g).abs(),
}


def orders(
    loaded: LoadedModel,
    score: str,
    windows: NDArray[np.int64],
    step: Callable[[str, float], AbstractContextManager[Any]],
) -> Orders:
    """Channels of every head by importance; Taylor's are kept on disk per model, dtype and text.

    Args:
        loaded: the model.
        score: `l1`, `l2` or `taylor`.
        windows: token windows `[W, T]` for Taylor's gradients; the others read weights alone.
        step: opens progress of a title and a total.

    Raises:
        ModelError: the model's projections are not apart from each other.
    """
    layers = projections(loaded.model)
    if score != "taylor":
        return _ranked(layers, loaded.shape, score)
    rows = windows[:, : windows.shape[1] // ROW * ROW].reshape(-1, min(ROW, windows.shape[1]))
    rows = np.ascontiguousarray(rows[:ROWS] if rows.size else windows[:, :ROW])

    def make() -> dict[str, Any]:
        with step("gradients of the channels", len(rows)) as shown, _gradients(layers):
            for row in rows:
                ids = torch.from_numpy(row)[None].to(loaded.device)
                logits = loaded.model(ids, use_cache=False).logits[0, :-1].float()
                cross_entropy(logits, ids[0, 1:], reduction="sum").backward()
                shown.advance()
            return asdict(_ranked(layers, loaded.shape, score))

    words = f"taylor/{loaded.digest}/{loaded.dtype}/{rows.shape}"
    return remembered("importance", words, rows.tobytes(), Orders.read, make)


def _ranked(layers: list[Projections], shape: ModelShape, score: str) -> Orders:
    found: list[list[Any]] = [[], [], []]
    for layer in layers:
        parts = _parts(layer, shape, score)  # [4, H, D]
        half = shape.head_dim // 2
        pairs = parts[..., :half] + parts[..., half : 2 * half]
        for order, x in zip(
            found, (pairs.mean(0), pairs[:2].mean(0), parts[2:].mean(0)), strict=True
        ):
            order.append(tuples(x.sort(stable=True, dim=-1, descending=True).indices.tolist()))
    return Orders(*(tuple(order) for order in found))


def _parts(layer: Projections, shape: ModelShape, score: str) -> Tensor:
    """Scores `[4, H, D]` of queries, keys, values and outputs, fp64."""
    parts = []
    for linear, rows in ((layer.q, True), (layer.k, True), (layer.v, True), (layer.o, False)):
        w, g = linear.weight.detach().double(), linear.weight.grad
        s = _OF[score](w, None if g is None else g.double()).sum(1 if rows else 0)
        parts.append(s.view(shape.kv_heads, -1, shape.head_dim).mean(1))
    return torch.stack(parts)


@contextmanager
def _gradients(layers: list[Projections]) -> Iterator[None]:
    """Let gradients flow to the projections, and leave the model as it was."""
    weights = [x.weight for p in layers for x in (p.q, p.k, p.v, p.o)]
    before = [w.requires_grad for w in weights]
    for w in weights:
        w.requires_grad_(True)
    try:
        with torch.enable_grad():
            yield
    finally:
        for w, needed in zip(weights, before, strict=True):
            w.requires_grad_(needed)
            w.grad = None
