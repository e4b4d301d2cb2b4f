"""Per-token NLL of several policies on the same windows, as one Parquet file."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from kvsearch.files import write_parquet


def write_nll(
    file: Path, nll: Sequence[tuple[str, NDArray[np.float32]]], ids: NDArray[np.int64]
) -> None:
    """Write columns policy, window, pos, token, nll.

    Args:
        file: to write.
        nll: nats per token `[W, T - 1]` of each policy, with its name.
        ids: token windows `[W, T]`; `token` is the one that was predicted, at position `pos`.
    """
    W, T = ids.shape
    n = W * (T - 1)
    columns = {
        "policy": pa.array([name for name, _ in nll for _ in range(n)]).dictionary_encode(),
        "window": np.tile(np.repeat(np.arange(W, dtype=np.int32), T - 1), len(nll)),
        "pos": np.tile(np.arange(1, T, dtype=np.int32), W * len(nll)),
        "token": np.tile(ids[:, 1:].astype(np.int32).ravel(), len(nll)),
        "nll": np.concatenate([found.ravel() for _, found in nll]),
    }
    write_parquet(file, pa.table(columns))
