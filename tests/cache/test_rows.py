"""Moving slots between pools of formats without a kernel: what `repack_kv` means, bit for bit."""

import pytest
import torch
from torch import Tensor

from kvsearch_kernels.packed_attention import Part
from kvsearch_kernels.quantize_kv import Format, Packed, dequantize, quantize
from kvsearch_kernels.repack_kv import NewPool, repack_kv
from tests.tagged import Device, here, tagged

Pair = tuple[Format | None, Format | None]
Q8, Q4, E4M3 = Format(8, 32, "ggml-0"), Format(4, 32, "ggml-0"), Format(8, 64, "e4m3")
BLOCKS = Format(4, 64, "lloyd", True, block=16)
LAYERS: dict[str, tuple[Pair, ...]] = {
    "one tier": ((Q8, Q8), (None, None)),
    "16 bits in a tier": ((None, Q8), (Q8, Q4), (None, None)),
    "three tiers": ((Q8, E4M3), (Q4, BLOCKS), (E4M3, Q4), (None, None)),
}
SIZES, B, H, D = (19, 7, 40, 5), 2, 3, 64
TYPES = {"dtype": torch.float16, "native": torch.float16}


def pools(formats: tuple[Pair, ...], heads: tuple[int, ...]) -> list[NewPool]:
    """Pools after a compaction in which all change but the last; then one that was empty."""
    draw = torch.Generator().manual_seed(0)

    def held(n: int, fmt: Format | None) -> Tensor | Packed:
        x = torch.randn(B, H, n, D, generator=draw).half()
        if fmt is None:
            return x
        packed = quantize(x, fmt)
        # encoding anew what is there could not give these bytes
        return Packed(packed.codes.flip(-1), -packed.scales)

    sizes = SIZES[: len(formats)]
    parts = [
        Part(*(held(n, fmt) for fmt in pair), *pair) for n, pair in zip(sizes, formats, strict=True)
    ]
    every = [torch.randperm(sum(sizes), generator=draw) for _ in range(6)]
    if heads:
        source = torch.stack(every[: heads[0] * heads[1]]).view(*heads, -1)
    else:
        source = every[0]
    made = [
        NewPool(source[..., 11 * i : 11 * i + 9], parts, i, pair) for i, pair in enumerate(formats)
    ]
    last = torch.arange(sizes[-1]) + sum(sizes[:-1])
    made.append(NewPool(last, parts, len(parts) - 1, formats[-1]))
    made.append(NewPool(torch.arange(2, 5), parts[-1:], 0, formats[-1]))
    return [*made, NewPool(source[..., :8] % sum(sizes[1:]), parts[1:], None, formats[0])]


def away(x: NewPool) -> NewPool:
    """The same elsewhere, where the host does not know how many slots enter."""

    def sent(y: Tensor | Packed) -> Tensor | Packed:
        if isinstance(y, Packed):
            return Packed(tagged(y.codes), tagged(y.scales))
        return tagged(y)

    parts = [Part(sent(p.keys), sent(p.values), p.key_format, p.value_format) for p in x.parts]
    return NewPool(tagged(x.source), parts, x.own, x.formats)


def plainly(pool: NewPool, side: int) -> list[Tensor]:
    """Rows and scales of keys (0) or values (1): all slots in the format of the result, picked."""
    fmt, found = pool.formats[side], []
    for i, part in enumerate(pool.parts):
        held, old = ((part.keys, part.key_format), (part.values, part.value_format))[side]
        if i != pool.own:
            x = held if old is None else dequantize(held, old).half()
            held = x if fmt is None else quantize(x, fmt)
        found.append(planes(held))
    batch, head = torch.arange(B)[:, None, None], torch.arange(H)[None, :, None]
    source = pool.source.expand(B, H, -1)
    return [torch.cat(x, 2)[batch, head, source] for x in zip(*found, strict=True)]


def planes(held: Tensor | Packed) -> tuple[Tensor, ...]:
    return (held.codes, held.scales) if isinstance(held, Packed) else (held,)


@pytest.mark.parametrize("heads", [(), (1, H), (B, H)])
@pytest.mark.parametrize("name", LAYERS)
def test_slots_get_to_other_pools_bit_for_bit(
    name: str, heads: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSEARCH_TRITON", "0")
    asked = pools(LAYERS[name], heads)
    device = Device()
    with device:
        there = repack_kv.reference([away(x) for x in asked], **TYPES)
    assert not device.waits
    for got in (repack_kv.reference(asked, **TYPES), there):
        for pool, sides in zip(asked, got, strict=True):
            for side, held in enumerate(sides):
                for x, y in zip(planes(held), plainly(pool, side), strict=True):
                    assert torch.equal(here(x), y)
