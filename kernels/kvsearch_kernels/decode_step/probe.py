"""Probe of `decode_step`. The op writes to its arguments: what was there before is drawn anew."""

from collections.abc import Iterator

import torch
from torch import Tensor

from kvsearch_kernels.budget import HARDWARE, over_budget
from kvsearch_kernels.decode_attention.reference import Part
from kvsearch_kernels.decode_step.reference import Heads, Stores, Sums, reference
from kvsearch_kernels.probing import Case, Draw
from kvsearch_kernels.quantize_kv.reference import Format, quantize

VOTERS = (0, 1, 2)  # heads that vote apart in a store, at most; 0: nobody asks
IN_USE, ROOM = 3, 5  # slots of the pools


def before(voters: int, device: torch.device, dtype: torch.dtype) -> Stores:
    """Two kinds of heads, one of them with two tiers, and sums that are in another order."""
    draw, native = Draw(device, dtype), torch.float16 if dtype is torch.float32 else dtype
    tiers = Format(5, 64, "lloyd", True), Format(4, 32), Format(2, 64, "lloyd")
    kinds = []
    for heads, formats, n in ((1, tiers[:1], 70), (2, tiers[1:], 33)):
        parts = []
        for fmt in formats:
            k, v = (quantize(draw.normal(2, heads, n, 64), fmt) for _ in "kv")
            parts.append(Part(k, v, fmt, fmt))
        lengths = torch.full((2, heads), IN_USE, dtype=torch.int32, device=device)
        keys, values = (draw.normal(2, heads, ROOM, 64, dtype=native) for _ in "kv")
        parts.append(Part(keys, values, lengths=lengths))
        sums, held, V = None, n * len(formats), min(voters, heads)
        if voters:
            order = torch.arange(held + ROOM, device=device).flip(0).expand(2, V, -1).contiguous()
            ones = torch.ones(2, V, held + ROOM, device=device)
            sums = Sums(ones, order, held, ROOM, 1.0, None if heads > 1 else 2, 0.9)
        kinds.append(Heads(parts, sums))
    return Stores(kinds)


def cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Without sums, and with those of heads together and apart."""
    draw = Draw(device, dtype, seed=1)
    for voters in VOTERS:
        stores = before(voters, device, dtype)
        native = stores.heads[0].parts[-1].keys
        assert isinstance(native, Tensor)
        k, v = (draw.normal(2, 3, 1, 64, dtype=native.dtype) for _ in "kv")
        more = {"scale": 0.3, "softcap": 4.0 if voters == 1 else None}
        yield (draw.normal(2, 6, 64), k, v, stores), more


def differs(
    got: Tensor, q: Tensor, k: Tensor, v: Tensor, stores: Stores, *, scale: float,
    softcap: float | None = None,
) -> str | None:  # fmt: skip
    """Why the output, or what was written, is wrong; or None."""
    last = stores.heads[-1].sums
    voters, cpu = 0 if last is None else last.sums.shape[1], torch.device("cpu")
    eager, exact = (before(voters, cpu, q.dtype) for _ in range(2))
    more = {"scale": scale, "softcap": softcap}
    out = reference(q, k, v, eager, **more)  # type: ignore[arg-type]
    right = reference(q.double(), k, v, exact, **more)  # type: ignore[arg-type]
    if reason := over_budget("output", got, out, right, slack=HARDWARE):
        return reason
    for mine, want, double in zip(stores.heads, eager.heads, exact.heads, strict=True):
        for what in ("keys", "values", "lengths"):
            if not torch.equal(getattr(mine.parts[-1], what), getattr(want.parts[-1], what)):
                return f"{what} of a pool are wrong after a token"
        if mine.sums is not None and want.sums is not None and double.sums is not None:
            found = mine.sums.sums, want.sums.sums, double.sums.sums.double()
            if reason := over_budget("sums", *found, slack=HARDWARE):
                return reason
    return None
