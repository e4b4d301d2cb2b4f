"""Probe of `decode_step`. The op writes to its arguments: what was there before is drawn anew."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvsearch_kernels.budget import HARDWARE, over_budget
from kvsearch_kernels.decode_step.probe_layers import LAYERS, drawn
from kvsearch_kernels.decode_step.reference import Stores, append, reference, tally
from kvsearch_kernels.decode_step.turned import arrived, as_read
from kvsearch_kernels.packed_attention.reference import Part, slots_of
from kvsearch_kernels.probing import Case, moved
from kvsearch_kernels.quantize_kv.reference import Format, Packed, dequantize


def cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Every head size, width, kind of level, groups, lengths, pools; with and without votes.

    In all of them flat attention, and the same formats next to attention sinks; keys that carry no
    angle have only the former.
    """
    for number, layer in enumerate(LAYERS):
        scale = 0.3 if layer.turns and layer.dim == 64 else layer.dim**-0.5
        yield moved(drawn(number, dtype), device), {"scale": scale, "softcap": layer.softcap}


def _wide(held: Tensor | Packed, fmt: Format | None, kind: torch.dtype) -> Tensor:
    """Keys or values `[B, H, N, D]` of another type, as torch would read a dequantised cache."""
    if isinstance(held, Packed):
        assert fmt is not None
        held = dequantize(held, fmt)
    return held.to(kind)


def attended(
    q: Tensor, parts: Sequence[Part], scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Attention the plain way, everything in the type of `q`.

    Returns:
        Output `[B, Hq, D]` and received attention `[B, H, N]`.
    """
    k = torch.cat([_wide(p.keys, p.key_format, q.dtype) for p in parts], 2)
    v = torch.cat([_wide(p.values, p.value_format, q.dtype) for p in parts], 2)
    B, H = k.shape[:2]
    s = (q * scale).unflatten(1, (H, -1)) @ k.mT
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    used = []
    for part in parts:
        n = slots_of(part)
        lengths = torch.full((B, H), n, device="cpu") if part.lengths is None else part.lengths
        used.append(torch.arange(n, device="cpu") < lengths.unsqueeze(-1))
    s = s.masked_fill(~torch.cat(used, -1).unsqueeze(2), float("-inf"))
    p = s.softmax(-1).nan_to_num()
    return (p @ v).flatten(1, 2), p.mean(2)


def plainly(
    q: Tensor, k: Tensor, v: Tensor, stores: Stores, *, scale: float, softcap: float | None = None
) -> Tensor:
    """As the reference, but with plain attention, everything in the type of `q`."""
    outs, first, group = [], 0, q.shape[1] // k.shape[1]
    for heads in stores.heads:
        pool, sums = heads.parts[-1], heads.sums
        assert isinstance(pool.keys, Tensor) and isinstance(pool.values, Tensor)
        assert pool.lengths is not None
        mine = slice(first, first + pool.keys.shape[1])
        query, key = q[:, mine.start * group : mine.stop * group], k[:, mine]
        parts = heads.parts
        if heads.turned is not None:
            query, key = arrived(query, key, heads.turned, pool.lengths)
        append(pool.keys, pool.values, pool.lengths, key.to(pool.keys.dtype), v[:, mine])
        if heads.turned is not None:
            parts = as_read(parts, heads.turned, q.dtype)
        out, received = attended(query, parts, scale, softcap)
        outs.append(out)
        if sums is not None:
            tally(
                sums.sums, received, sums.order, pool.lengths, held=sums.held, end=sums.end,
                alpha=sums.alpha, horizon=sums.horizon, keep=sums.keep,
            )  # fmt: skip
        first = mine.stop
    return torch.cat(outs, 1)


def differs(
    got: Tensor, q: Tensor, k: Tensor, v: Tensor, stores: Stores, *, scale: float,
    softcap: float | None = None,
) -> str | None:  # fmt: skip
    """Why the output, or what was written, is wrong; or None."""
    eager, exact = (drawn(stores.kept["layer"], q.dtype)[-1] for _ in range(2))
    return compared(got, stores, (q, k, v), eager, exact, scale=scale, softcap=softcap)


def compared(
    got: Tensor, stores: Stores, qkv: tuple[Tensor, Tensor, Tensor], eager: Stores, exact: Stores,
    *, scale: float, softcap: float | None = None,
) -> str | None:  # fmt: skip
    """Why the output `got`, or what was written to `stores`, is wrong; or None.

    `eager` and `exact` are the stores as they were, and are written to.
    """
    q, k, v = qkv
    out = plainly(q, k, v, eager, scale=scale, softcap=softcap)
    right = reference(q.double(), k, v, exact, scale=scale, softcap=softcap)
    for b, one in enumerate(zip(got, out, right, strict=True)):
        if reason := over_budget(f"output of sequence {b}", *one, slack=HARDWARE):
            return reason
    for mine, want, double in zip(stores.heads, eager.heads, exact.heads, strict=True):
        for what in ("values", "lengths"):
            if not torch.equal(getattr(mine.parts[-1], what), getattr(want.parts[-1], what)):
                return f"{what} of a pool are wrong after a token"
        keys, wanted = mine.parts[-1].keys, want.parts[-1].keys
        assert isinstance(keys, Tensor) and isinstance(wanted, Tensor)
        if not torch.equal(keys, wanted) and (mine.turned is None or _far(keys, wanted)):
            return "keys of a pool are wrong after a token"
        if mine.sums is not None and want.sums is not None and double.sums is not None:
            found = mine.sums.sums, want.sums.sums, double.sums.sums.double()
            if reason := over_budget("sums", *found, slack=HARDWARE):
                return reason
    return None


def _far(keys: Tensor, wanted: Tensor) -> bool:
    """Whether keys differ by more than a cosine's last bit, which may round to the next number."""
    off = (keys.float() - wanted.float()).abs()
    return not bool(
        (off <= torch.finfo(keys.dtype).eps * wanted.float().abs().clamp_min(0.1)).all()
    )
