"""The layers of `decode_step`'s probe: heads that differ in formats, slots, and what is asked."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvsearch_kernels.decode_step.reference import Heads, Stores, Sums
from kvsearch_kernels.decode_step.turned import Turned
from kvsearch_kernels.packed_attention.reference import Part
from kvsearch_kernels.probing import Draw
from kvsearch_kernels.quantize_kv.reference import Format, Packed, quantize

BATCH = 2
SPARE = 37  # slots of the pool that a part is the front of

# Formats of keys and values, slots, and how many are in use: None is all, as is SOME in the second
# sequence, whose heads in the first have any number.
SOME = -1
Tier = tuple[Format | None, Format | None, int, int | None]


@dataclass(frozen=True)
class Alike:
    """KV heads that are alike: how many, what they hold, slots of their pool, how many in use."""

    heads: int
    tiers: Sequence[Tier] = ()
    room: int = 5
    used: int = 3

    @property
    def before(self) -> int:
        """Slots of other parts than the pool."""
        return sum(slots for *_, slots, _ in self.tiers)


@dataclass(frozen=True)
class Layer:
    """A case.

    Attributes:
        dim: of heads.
        group: query heads of a KV head.
        stores: in order.
        voters: heads that vote apart in a store, at most; 0: nobody asks what slots receive.
        turns: keys carry no angle. Of 64 channels 48 turn, by slots in another order.
        softcap: on products.
        fronts: packed parts are the front of longer pools.
    """

    dim: int
    group: int
    stores: Sequence[Alike]
    voters: int = 0
    turns: bool = False
    softcap: float | None = None
    fronts: bool = False


def even(bits: int, group: int, rotate: bool = False, block: int | None = None) -> Format:
    """Even levels."""
    return Format(bits, group, rotate=rotate, block=block)


def lloyd(bits: int, group: int, rotate: bool = True, block: int | None = None) -> Format:
    """Lloyd-Max levels."""
    return Format(bits, group, "lloyd", rotate, block=block)


def same(fmt: Format, slots: int, used: int | None = None) -> Tier:
    """Keys and values in one format."""
    return fmt, fmt, slots, used


TINY = (even(8, 128), even(4, 128))
# whose keys share scales with the tokens next to them, unless keys are turned
ALONG = Alike(1, ((Format(4, 16, along="tokens"), even(4, 64), 37, 35),
                  (Format(2, 32, "lloyd", along="tokens"), even(2, 32), 37, 35)))  # fmt: skip
ASKED = {
    64: (Alike(1, (same(lloyd(5, 64), 70),)),
         Alike(2, (same(even(4, 32), 33), same(lloyd(2, 64, False), 33)))),
    # one of four that holds nothing but its pool, one whose tier is empty; rotations are in blocks
    128: (Alike(1), Alike(1, ((*TINY, 131, 77), (lloyd(8, 64, block=64), lloyd(1, 64, block=16),
                                                 131, 77))),
          Alike(2, ((*TINY, 9, 0),))),
}  # fmt: skip

# Each width with both kinds of levels. Many formats a layer, because every set of formats is a
# compilation of its own; of up to four without groups or lookups, tiles are others.
LAYERS = (
    Layer(64, 3, (
        Alike(1, ((None, even(4, 64), 65, None), (even(3, 64), even(3, 32), 70, None),
                  (lloyd(8, 64), lloyd(1, 64), 130, None))),
        Alike(1, ((lloyd(2, 64), lloyd(5, 64), 33, None), (lloyd(5, 64), lloyd(4, 64), 300, SOME),
                  (lloyd(4, 32), lloyd(2, 32), 257, SOME))),
        Alike(1, ((even(2, 64), even(8, 64), 33, None),)),
    )),
    Layer(128, 1, (
        Alike(1, ((lloyd(4, 128), lloyd(3, 64), 65, None),
                  (even(1, 64), lloyd(2, 128, False), 40, None),
                  (lloyd(3, 128, False), even(8, 32), 9, None))),
        Alike(1, ((even(3, 128), even(4, 32), 33, None),)),
    )),
    Layer(128, 2, (
        Alike(1, ((lloyd(1, 128), lloyd(4, 128), 1, None), (lloyd(4, 32), lloyd(3, 32), 70, SOME),
                  (lloyd(5, 32), lloyd(5, 128), 40, None))),
    )),
    Layer(128, 4, (
        Alike(1, ((lloyd(5, 64), lloyd(4, 64), 150, None), (lloyd(2, 128), even(1, 128), 130, SOME),
                  (even(4, 32), even(3, 32), 65, None)), room=75, used=70),
    )),
    Layer(128, 4, (Alike(2, ((*TINY, 64, None),), room=75, used=70),)),
    # keys and values that are rotated in blocks of different size, next to others
    Layer(64, 2, (
        Alike(1, ((lloyd(4, 64, block=32), lloyd(4, 64, block=16), 70, None),
                  (even(4, 64), even(2, 64, True, block=16), 33, None),
                  (even(4, 32), even(2, 32), 65, None))),
    )),
    Layer(256, 8, (Alike(1, (same(even(4, 64), 129),), 33, 32),)),
    Layer(256, 8, (Alike(1, ((lloyd(4, 256), lloyd(4, 64), 40, None),)),)),
    Layer(64, 1, (Alike(2, room=301, used=299), Alike(1, (same(even(2, 64), 70),), 1, 0)),
          softcap=3.0, fronts=True),
    *(Layer(D, 2, stores, voters, softcap=4.0 if voters == 1 else None)
      for D, stores in ((64, (ALONG, *ASKED[64])), (128, ASKED[128])) for voters in (0, 1, 2)),
    *(Layer(D, 2, ASKED[D], voters, turns=True, softcap=4.0 if voters == 1 else None)
      for D in ASKED for voters in (0, 1)),
)  # fmt: skip


def drawn(number: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Stores]:
    """Queries, keys and values of a token, and stores, on the CPU; `kept` has the layer's number.

    Attention is flat in the first sequence. In the second, if keys are not turned, each tier has a
    slot that receives nearly everything: its product is about 13 above the others, and its values
    are close to zero, as those of attention sinks are. What the other slots add up to is small, and
    must still be right.
    """
    layer, draw = LAYERS[number], Draw(torch.device("cpu"), dtype, number)
    D, H = layer.dim, sum(alike.heads for alike in layer.stores)
    native = dtype
    if dtype is torch.float32 and (D == 64 or layer.voters or layer.turns):
        native = torch.float16  # as fp32 models hold their cache
    q = draw.normal(BATCH, H, layer.group, D)
    along = draw.whole(0, 2, H, 1, D, dtype=dtype) * 2 - 1
    if not layer.turns:
        q[1] = along + q[1] / 4
    stores, first = [], 0
    for alike in layer.stores:
        sink = along[first : first + alike.heads].to(native) * (13 * D**-0.5)
        parts = _parts(layer, alike, draw, native, None if layer.turns else sink)
        stores.append(Heads(parts, _sums(layer, alike), _turned(layer, alike, draw)))
        first += alike.heads
    k, v = (draw.normal(BATCH, H, 1, D, dtype=native) for _ in "kv")
    return q.flatten(1, 2), k.to(dtype) if layer.turns else k, v, Stores(stores, {"layer": number})


def _parts(
    layer: Layer, alike: Alike, draw: Draw, native: torch.dtype, sink: Tensor | None
) -> list[Part]:
    found, H = [], alike.heads
    for i, (key, value, n, used) in enumerate((*alike.tiers, (None, None, alike.room, alike.used))):
        more = SPARE if layer.fronts and key is not None else 0
        k, v = (draw.normal(BATCH, H, n + more, layer.dim, dtype=native) for _ in "kv")
        if sink is not None and (key or value or not alike.tiers):
            at = (used if used is not None and used > 0 else n) // (i + 2)
            k[1, :, at : at + 1] = sink
            v[1, :, at] *= 2**-12
        lengths = None
        if used == SOME:
            lengths = draw.whole(0, n + 1, BATCH, H, dtype=torch.int32)
            lengths[1] = n
        elif used is not None:
            lengths = torch.full((BATCH, H), used, dtype=torch.int32, device="cpu")
        found.append(Part(_held(k, key, n), _held(v, value, n), key, value, lengths))
    return found


def _held(x: Tensor, fmt: Format | None, n: int) -> Tensor | Packed:
    """The first `n` slots of a pool, in a format."""
    if fmt is None:
        return x
    packed = quantize(x, fmt)
    if x.shape[2] == n:
        return packed
    return Packed(packed.codes[:, :, :n], packed.scales[:, :, :n])


def _sums(layer: Layer, alike: Alike) -> Sums | None:
    """Those of 64 channels are in another order, and forget."""
    if not layer.voters:
        return None
    held, room, voters = alike.before, alike.room, min(layer.voters, alike.heads)
    ones = torch.ones(BATCH, voters, held + room, dtype=torch.float32, device="cpu")
    if layer.dim == 64:
        order = torch.arange(held + room, device="cpu").flip(0)
        order = order.expand(BATCH, voters, -1).contiguous()
        return Sums(ones, order, held, room, 1.0, None if alike.heads > 1 else 2, 0.9)
    # of these the last do not count the token, which one more will follow
    return Sums(ones, None, held, room, 0.5 * (layer.voters - 1), 3 - alike.heads, 1.0)


def _turned(layer: Layer, alike: Alike, draw: Draw) -> Turned | None:
    if not layer.turns:
        return None
    pair = torch.arange(24 if layer.dim == 64 else 64, dtype=torch.float32, device="cpu")
    index = None
    if layer.dim == 64:
        index = draw.whole(0, 3000, BATCH, alike.heads, alike.before + alike.room)
    return Turned(100.0 ** (-pair / 64), index, alike.before, 5000)
