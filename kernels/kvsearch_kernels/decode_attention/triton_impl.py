"""Triton implementation of `decode_attention`; importing it imports no Triton."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from kvsearch_kernels.codebooks.gaussian import lloyd_levels
from kvsearch_kernels.configs import DECODE_WARPS, Tile, decode_tile
from kvsearch_kernels.decode_attention.lookup_asm import tables
from kvsearch_kernels.decode_attention.reference import Part, check_lengths, slots_of
from kvsearch_kernels.decode_attention.splits import cost_of
from kvsearch_kernels.decode_attention.splits import splits as splits_of
from kvsearch_kernels.host_to_device import sent
from kvsearch_kernels.launch import (
    DTYPES,
    FUSED,
    HEAD_DIMS,
    ceil_div,
    emulated,
    multiprocessors,
    on,
    why_not_here,
)
from kvsearch_kernels.quantize_kv.reference import Format, Packed
from kvsearch_kernels.quantize_kv.triton_impl import steps_of
from kvsearch_kernels.quantize_kv.triton_inverse import why_not_packed

__all__ = ["emulated", "forward", "why_not"]

MOST_PARTS = 4
_levels: dict[torch.device, Tensor] = {}
_flags: dict[tuple[tuple[bool, ...], torch.device], Tensor] = {}


def _why_not_held(
    what: str, held: Tensor | Packed, fmt: Format | None, q: Tensor, shape: tuple[int, int, int],
    *, grouped: bool = False,
) -> str | None:  # fmt: skip
    """Reason why the keys or values of a part cannot be read, or None.

    `grouped` says that their groups may be along tokens.
    """
    if isinstance(held, Packed) != (fmt is not None):
        return f"{what} must be packed exactly when they have a format, got format {fmt}"
    D = q.shape[-1]
    if isinstance(held, Packed):
        assert fmt is not None
        reason = why_not_here(q, held.codes, held.scales)
        if reason or (reason := why_not_packed(held, fmt, grouped=grouped)):
            return f"{what}: {reason}"
        if held.codes.data_ptr() % 2 or held.scales.data_ptr() % 4:  # read as words
            return f"{what} must start at an even address, and their scales at a multiple of 4"
        got = (*held.codes.shape[:-1], held.codes.shape[-1] * 8 // fmt.bits)
    else:
        if reason := why_not_here(q, held):
            return reason
        if held.dtype is not q.dtype and not (
            q.dtype is torch.float32 and held.dtype in (torch.float16, torch.bfloat16)
        ):  # an fp32 model holds its cache in 16 bits
            return f"{what} must have the dtype of the queries, {q.dtype}, got {held.dtype}"
        got = tuple(held.shape)
    wanted = (*shape, D)
    return None if got == wanted else f"{what} must have shape {wanted}, got {got}"


def why_not(
    q: Tensor, parts: Sequence[Part], *, scale: float, softcap: float | None = None
) -> str | None:
    """Reason why these arguments cannot be taken, or None."""
    return why_not_parts(q, parts, scale, softcap)


def why_not_parts(
    q: Tensor, parts: Sequence[Part], scale: float, softcap: float | None, *, grouped: bool = False
) -> str | None:
    """The same; `grouped` says that keys may be grouped along tokens, as in `decode_step`."""
    if reason := why_not_here(q):
        return reason
    if q.dtype not in DTYPES:
        return f"dtype must be float16, bfloat16 or float32, got {q.dtype}"
    if q.dim() != 3 or q.shape[-1] not in HEAD_DIMS:
        return f"q must be [B, Hq, 64, 128 or 256], got shape {tuple(q.shape)}"
    if not 1 <= len(parts) <= MOST_PARTS:
        return f"there must be 1 to {MOST_PARTS} parts, got {len(parts)}"
    B, Hq = q.shape[:2]
    for i, part in enumerate(parts):
        held = part.keys.codes if isinstance(part.keys, Packed) else part.keys
        if held.dim() != 4 or held.shape[1] == 0 or Hq % held.shape[1]:
            return f"KV heads must divide {Hq} query heads, got keys {tuple(held.shape)}"
        most = 32 if q.dtype == torch.float32 else 64  # else some GPUs lack shared memory
        if Hq // held.shape[1] > most:
            return f"query heads per KV head must be at most {most}, got {Hq // held.shape[1]}"
        if B * held.shape[1] > 65535:
            return f"batch x KV heads must be at most 65535, got {B * held.shape[1]}"
        shape = (B, held.shape[1], held.shape[2])
        first = parts[0].keys.codes if isinstance(parts[0].keys, Packed) else parts[0].keys
        if held.shape[1] != first.shape[1]:
            return f"parts differ in KV heads, {first.shape[1]} and {held.shape[1]}"
        for what, x, fmt, along in (
            (f"keys of part {i}", part.keys, part.key_format, grouped),
            (f"values of part {i}", part.values, part.value_format, False),
        ):
            if reason := _why_not_held(what, x, fmt, q, shape, grouped=along):
                return reason
        if part.lengths is not None and part.lengths.shape != shape[:2]:
            return f"lengths must have shape {shape[:2]}, got {tuple(part.lengths.shape)}"
    if reason := why_not_turned(parts, q.shape[-1]):
        return reason
    if not scale > 0:
        return f"scale must be above 0, got {scale}"
    if softcap is not None and not softcap > 0:
        return f"softcap must be above 0, got {softcap}"
    return None


def turns_of(parts: Iterable[Part], D: int) -> tuple[list[int], list[int]]:
    """Different `steps_of` the rotations of keys, and of values; of none there are no steps."""
    formats = [(p.key_format, p.value_format) for p in parts]
    keys, values = ({steps_of(pair[side], D) for pair in formats} - {0} for side in (0, 1))
    return sorted(keys), sorted(values)


def why_not_turned(parts: Iterable[Part], D: int) -> str | None:
    """Reason why one rotation of the queries, and one of the output, do not serve all parts."""
    for what, steps in zip(("keys", "values"), turns_of(parts, D), strict=True):
        if len(steps) > 1:
            blocks = [1 << s for s in steps]
            return f"rotated {what} must mix as many channels in all parts, got {blocks}"
    return None


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
        return part.lengths.int().contiguous()
    if "lengths of triton" not in part.known:
        held = part.keys.codes if isinstance(part.keys, Packed) else part.keys
        full = torch.full(held.shape[:2], held.shape[2], dtype=torch.int32, device=held.device)
        part.known["lengths of triton"] = full
    made: Tensor = part.known["lengths of triton"]
    return made


def _flags_on(flags: Sequence[bool], device: torch.device) -> Tensor:
    """Flags as int32, kept on the device: a copy from the host would break a CUDA graph."""
    key = tuple(flags), device
    if key not in _flags:
        _flags[key] = sent(np.array(key[0], dtype=np.int32), device)
    return _flags[key]


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


def pools_of(part: Part) -> tuple[list[Tensor], int]:
    """Keys, their scales, values, theirs, and the slots of the pools that they are the front of."""
    sides: list[Tensor] = []
    for held in (part.keys, part.values):
        if isinstance(held, Packed):
            sides += [held.codes, held.scales.flatten(-2)]
        else:
            sides += [held, held]  # no scales: the second is never read
    H = sides[0].shape[1]
    rows = [x.shape[-1] for x in sides]
    capacity = sides[0].stride(1) // rows[0]
    fits = all(
        x.stride() == (H * capacity * w, capacity * w, w, 1)
        for x, w in zip(sides, rows, strict=True)
    )
    if not fits:
        return [x.contiguous() for x in sides], sides[0].shape[2]
    return sides, capacity


def forward(
    q: Tensor, parts: Sequence[Part], *, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """As `reference`."""
    from kvsearch_kernels.decode_attention.triton_kernels import combine, decode, turn

    B, Hq, D = q.shape
    check_lengths(parts)
    fp32 = partial(torch.empty, dtype=torch.float32, device=q.device)
    out = torch.empty(B, Hq, D, dtype=q.dtype, device=q.device)
    lse = fp32(B, Hq)
    width = sum(slots_of(p) for p in parts)
    found = [(p, *pools_of(p)) for p in parts if slots_of(p)]
    if not found or out.numel() == 0:
        return out.zero_(), lse.fill_(float("-inf"))
    H = found[0][1][0].shape[1]
    G = Hq // H
    kinds = [constants(p.key_format, p.value_format, D, q.dtype) for p, _, _ in found]
    tile = tile_of(kinds, D, q.element_size(), G)
    sizes = [slots_of(p) for p, _, _ in found]
    pairs = [(p.key_format, p.value_format) for p, _, _ in found]
    counts = splits_of(
        tuple(cost_of(n, pair) for n, pair in zip(sizes, pairs, strict=True)),
        tuple(ceil_div(n, tile.columns) for n in sizes),
        (B * H,) * len(found),
        programs_at_once(tile, q.device),
    )
    splits = sum(counts)
    q = q.contiguous()
    rotated: Tensor | None = None
    turns = turns_of((p for p, _, _ in found), D)
    args: list[Tensor | int] = []
    fixed: dict[str, int | bool] = {}
    turned: list[bool] = []
    lengths = [lengths_of(p) for p, _, _ in found]
    for i in range(MOST_PARTS):  # the kernel takes as many: the last again, never read
        last = min(i, len(found) - 1)
        part, pools, capacity = found[last]
        own = q
        if steps_of(part.key_format, D):
            if rotated is None:
                rotated = torch.empty(*q.shape, dtype=q.dtype, device=q.device)
                with on(q.device):
                    turn[(B * Hq,)](q, rotated, D=D, STEPS=turns[0][0], **FUSED, num_warps=1)
            own = rotated
        count = counts[i] if i < len(found) else 0
        args += [own, *pools, lengths[last], capacity, count, sum(sizes[:i])]
        fixed |= {f"{name}{i}": value for name, value in kinds[last].items()}
        turned += [steps_of(part.value_format, D) > 0] * count
    outs, bits = fp32(B * H, splits, G, D), fp32(B * H, splits, G)
    with on(q.device):
        decode[(splits, B * H)](
            *args, outs, bits, bits, levels_on(q.device),
            G, splits, width, scale, softcap or 1.0,
            D=D, GP=tile.rows, BN=tile.columns,
            HAS_CAP=softcap is not None, SCORES=False, PARTS=len(found), ASM=not emulated(),
            **fixed, STAGES=tile.stages, **FUSED, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        combine[(B * H, G)](
            outs, bits, out, lse,
            _flags_on(turned, q.device),
            G, splits, D=D, SP=1 << (splits - 1).bit_length(), STEPS=max(turns[1], default=0),
            **FUSED, num_warps=4,
        )  # fmt: skip
    return out, lse
