"""What the Triton kernels are given of parts; importing it imports no Triton."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvsearch_kernels.codebooks.gaussian import lloyd_levels
from kvsearch_kernels.configs import DECODE_WARPS, Tile, decode_tile
from kvsearch_kernels.host_to_device import sent
from kvsearch_kernels.launch import multiprocessors
from kvsearch_kernels.packed_attention.limits import MOST_PARTS
from kvsearch_kernels.packed_attention.lookup_asm import tables
from kvsearch_kernels.packed_attention.reference import Part
from kvsearch_kernels.quantize_kv.reference import Format, Packed

_levels: dict[torch.device, Tensor] = {}


def levels_on(device: torch.device) -> Tensor:
    """What decoding reads of formats, fp32.

    Lloyd-Max levels of 1 to 5 and of 8 bits, one table after the other; 2**0 to 2**7; and twice the
    bits of `lookup_asm.tables`, of Lloyd's 2 to 5 bits and of 3 even ones.
    """
    if device not in _levels:
        levels = [lloyd_levels(b) for b in (1, 2, 3, 4, 5, 8)]
        powers = torch.exp2(torch.arange(8, dtype=torch.float32, device="cpu"))
        words = [*tables(2), *tables(3), *tables(4), *tables(5), *tables(3, lloyd=False)]
        twice = torch.tensor(words * 2, dtype=torch.int32, device="cpu").view(torch.float32)
        _levels[device] = sent(torch.cat([*levels, powers, twice]).numpy(), device)
    return _levels[device]


def lengths_of(part: Part) -> Tensor:
    """Slots in use `[B, H]` int32 of a part; where all are, that is written once."""
    if part.lengths is not None:
        return part.lengths
    if "lengths of triton" not in part.known:
        held = part.keys.codes if isinstance(part.keys, Packed) else part.keys
        full = torch.full(held.shape[:2], held.shape[2], dtype=torch.int32, device=held.device)
        part.known["lengths of triton"] = full
    made: Tensor = part.known["lengths of triton"]
    return made


def constants(
    key: Format | None, value: Format | None, D: int, dtype: torch.dtype
) -> dict[str, int | bool]:
    """Compile-time arguments of one part, without its number.

    How a side is read, KF and VF: 0 as values; in registers of the product, 1 codes in place, 2
    levels looked up. Groups along tokens have a negative size.
    """
    found: dict[str, int | bool] = {}
    for side, fmt in (("K", key), ("V", value)):
        bits, group = (16, D) if fmt is None else (fmt.bits, fmt.group)
        lloyd = fmt is not None and fmt.levels == "lloyd"
        found |= {f"{side}B": bits, f"{side}G": group, f"{side}L": lloyd}
        in_place = bits in ((1, 8) if lloyd else (1, 2, 4, 8))
        looked_up = bits in ((2, 3, 4, 5) if lloyd else (3,))
        # groups of whole planes, as wide as in the kernel; others cost products of their own
        plane = max(32, D * (4 if looked_up else bits) // 8)
        whole = group % plane == 0
        few = group % 32 == 0 and D // group <= 4 and plane // group <= 2
        direct = (whole or few) and dtype is not torch.float32
        if fmt is not None and fmt.along == "tokens":
            found[f"{side}G"], direct = -group, False
        found[f"{side}F"] = (1 if in_place else 2 if looked_up else 0) * direct
    return found


def tile_of(kinds: Sequence[Mapping[str, int | bool]], D: int, itemsize: int, heads: int) -> Tile:
    """Tile of a launch, by the `constants` of its parts and the query heads of a KV head."""
    sides = [{name: fixed[side + name] for name in "BGLF"} for fixed in kinds for side in "KV"]
    looked_up = any(x["F"] == 2 for x in sides)
    groups = any(x["F"] and x["G"] < D for x in sides)
    slow = any(x["L"] and x["B"] in (2, 3, 4, 5) and not x["F"] for x in sides)
    loaded = looked_up or groups or len(kinds) > MOST_PARTS
    return decode_tile(D, itemsize, heads, loaded=loaded, lookups=slow)


def programs_at_once(tile: Tile, device: torch.device) -> int:
    """How many programs with such a tile the device is taken to run at once."""
    return max(1, DECODE_WARPS // tile.warps) * multiprocessors(device)
