"""Probe of `decode_step`. The op writes to its arguments: what was there before is drawn anew."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvsearch_kernels.budget import HARDWARE, over_budget
from kvsearch_kernels.decode_attention.probe import eager as attend
from kvsearch_kernels.decode_attention.probe import lloyd
from kvsearch_kernels.decode_attention.reference import Part
from kvsearch_kernels.decode_step.reference import Heads, Stores, Sums, append, reference, tally
from kvsearch_kernels.decode_step.turned import Turned, arrived, as_read
from kvsearch_kernels.probing import Case, Draw
from kvsearch_kernels.quantize_kv.reference import Format, quantize

VOTERS = (0, 1, 2)  # heads that vote apart in a store, at most; 0: nobody asks
IN_USE, ROOM = 3, 5  # slots of the pools
Tiers = Sequence[tuple[Format, Format]]

# head size -> heads that are alike, their tiers, slots of each, how many of these are in use
LAYERS: dict[int, Sequence[tuple[int, Tiers, int, int]]] = {
    64: (
        (1, ((lloyd(5, 64), lloyd(5, 64)),), 70, 70),
        (2, ((Format(4, 32), Format(4, 32)), (lloyd(2, 64, False), lloyd(2, 64, False))), 33, 33),
    ),
    # one of four that holds nothing but its pool, one whose tier is empty; rotations are in blocks
    128: (
        (1, (), 0, 0),
        (1, ((Format(8, 128), Format(4, 128)),
             (lloyd(8, 64, block=64), lloyd(1, 64, block=16))), 131, 77),
        (2, ((Format(8, 128), Format(4, 128)),), 9, 0),
    ),
}  # fmt: skip


# and one whose keys share scales with the tokens next to them, unless keys are turned
GROUPED = {64: (1, ((Format(4, 16, along="tokens"), Format(4, 64)),
                    (Format(2, 32, "lloyd", along="tokens"), Format(2, 32))), 37, 35)}  # fmt: skip


def layer(D: int, *, turns: bool) -> Sequence[tuple[int, Tiers, int, int]]:
    """The heads of a layer."""
    return LAYERS[D] if turns or D not in GROUPED else (GROUPED[D], *LAYERS[D])


def before(
    voters: int, D: int, device: torch.device, dtype: torch.dtype, *, turns: bool = False
) -> Stores:
    """Heads that differ in tiers and slots, and sums that are in another order (of 64 channels).

    With `turns`, their keys carry no angle. Of 64 channels 48 turn, by slots in another order.
    """
    draw, native = Draw(device, dtype), torch.float16 if dtype is torch.float32 else dtype
    kinds = []
    for heads, tiers, n, used in layer(D, turns=turns):
        parts = []
        for formats in tiers:
            k, v = (quantize(draw.normal(2, heads, n, D), fmt) for fmt in formats)
            lengths = torch.full((2, heads), used, dtype=torch.int32, device=device)
            parts.append(Part(k, v, *formats, None if used == n else lengths))
        lengths = torch.full((2, heads), IN_USE, dtype=torch.int32, device=device)
        keys, values = (draw.normal(2, heads, ROOM, D, dtype=native) for _ in "kv")
        parts.append(Part(keys, values, lengths=lengths))
        sums, held, V = None, n * len(tiers), min(voters, heads)
        if voters:
            ones = torch.ones(2, V, held + ROOM, dtype=torch.float32, device=device)
            if D == 64:
                order = torch.arange(held + ROOM, device=device).flip(0)
                order = order.expand(2, V, -1).contiguous()
                sums = Sums(ones, order, held, ROOM, 1.0, None if heads > 1 else 2, 0.9)
            else:  # of these the last do not count the token, which one more will follow
                sums = Sums(ones, None, held, ROOM, 0.5 * (voters - 1), 3 - heads, 1.0)
        how = None
        if turns:
            # a GPU's powers differ in the last bit, and 5000 times that is an angle
            pair = torch.arange(24 if D == 64 else 64, dtype=torch.float32, device="cpu")
            inv_freq = (100.0 ** (-pair / 64)).to(device)
            index = draw.whole(0, 3000, 2, heads, held + ROOM) if D == 64 else None
            how = Turned(inv_freq, index, held, 5000)
        kinds.append(Heads(parts, sums, how))
    return Stores(kinds)


def cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Without sums, and with those of heads together and apart; heads of two and three kinds.

    With sums of heads together, and without, also keys that carry no angle.
    """
    draw = Draw(device, dtype, seed=1)
    for D in LAYERS:
        for voters, turns in (*((voters, False) for voters in VOTERS), (0, True), (1, True)):
            H = sum(heads for heads, *_ in layer(D, turns=turns))
            stores = before(voters, D, device, dtype, turns=turns)
            native = stores.heads[0].parts[-1].keys
            assert isinstance(native, Tensor)
            k, v = (draw.normal(2, H, 1, D, dtype=native.dtype) for _ in "kv")
            k = k.to(dtype) if turns else k
            more = {"scale": 0.3 if D == 64 else D**-0.5, "softcap": 4.0 if voters == 1 else None}
            yield (draw.normal(2, 2 * H, D), k, v, stores), more


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
        out, _, received = attend(query, parts, scale=scale, softcap=softcap)
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
    last = stores.heads[-1].sums
    voters, cpu = 0 if last is None else last.sums.shape[1], torch.device("cpu")
    how = {"turns": stores.heads[0].turned is not None}
    eager, exact = (before(voters, q.shape[-1], cpu, q.dtype, **how) for _ in range(2))
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
    if reason := over_budget("output", got, out, right, slack=HARDWARE):
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
