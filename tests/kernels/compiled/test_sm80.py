"""The kernels also compile for sm_80; only spills and sizes are held there, not instructions."""

import pytest

pytest.importorskip("triton", reason="triton is not installed")

import torch
from evict_cases import EVICTS, compiled
from kernel_aot import compile_kernel, types
from triton.backends.compiler import GPUTarget

from kvsearch_kernels.choose_slots.triton_kernels import choose
from kvsearch_kernels.configs import (
    COPY_BYTES,
    COPY_WARPS,
    GATHER_ROWS,
    GATHER_WARPS,
    REPACK_ROWS,
    SCORE,
    attend_tile,
    choose_warps,
    repack_warps,
)
from kvsearch_kernels.copy_rows.triton_kernels import copy_all
from kvsearch_kernels.decode_attention.read_kernels import stages_of
from kvsearch_kernels.decode_attention.triton_impl import constants as part_constants
from kvsearch_kernels.decode_attention.triton_impl import tile_of
from kvsearch_kernels.decode_attention.triton_kernels import decode
from kvsearch_kernels.decode_step.triton_impl import ORDER
from kvsearch_kernels.decode_step.triton_kernels import attend_heads, turn_heads
from kvsearch_kernels.gather_rows.triton_kernels import gather_all
from kvsearch_kernels.lifetime_attention.triton_kernels import attend
from kvsearch_kernels.quantize_kv import Format
from kvsearch_kernels.repack_kv.table import constants as repack_constants
from kvsearch_kernels.repack_kv.triton_kernels import repack
from kvsearch_kernels.score_keys.triton_kernels import score

SM80 = GPUTarget("cuda", 80, 32)
SHARED_LIMIT = 99 * 1024  # also that of sm_86 and sm_89


def fits(cost, *, tensor=True):
    assert cost.stack == 0, cost
    assert cost.spills == 0, cost
    assert cost.shared <= SHARED_LIMIT, cost
    assert cost.tensor > 0 or not tensor, cost


@pytest.mark.parametrize("D", [64, 128, 256])
def test_attention_and_scores(D):
    pointers = {
        "q k v out": "fp16",
        "birth death anchors isolated table counts": "i32",
        "lse weights": "fp32",
    }
    for capped in (False, True):
        tile = attend_tile(D, 2, capped, ampere=True)
        found = types(attend, pointers, "scale cap", "sqb sqh sqm skb skh ske svb svh sve")
        fixed = {"D": D, "DV": D, "BM": tile.rows, "BN": tile.columns, "HAS_CAP": capped,
                 "ISOLATE": False}  # fmt: skip
        cost = compile_kernel(attend, found, fixed, warps=tile.warps, stages=tile.stages,
                              target=SM80)  # fmt: skip
        fits(cost)
        assert D == 256 or not cost.hasty, cost
    tile = SCORE[D, 2]
    found = types(score, {**pointers, "out": "fp32"}, "scale cap", "sqb sqh sqm skb skh ske")
    fixed = {"D": D, "BM": tile.columns, "BN": tile.rows, "HAS_CAP": False, "MAX": False}
    fits(compile_kernel(score, found, fixed, warps=tile.warps, stages=tile.stages, target=SM80))


@pytest.mark.parametrize(
    ("bits", "D", "group", "levels"),
    [
        *((bits, D, D, "uniform") for bits, D in
          [(8, 64), (2, 64), (8, 128), (4, 128), (1, 128), (8, 256), (1, 256), (3, 128)]),
        *((4, D, 32, "uniform") for D in (64, 128)),
        *((bits, D, D, "lloyd") for bits in (2, 3, 4, 5) for D in (64, 128)),
        *((bits, D, 32, "lloyd") for bits in (4, 5) for D in (64, 128)),
        *((4, 256, group, "lloyd") for group in (64, 256)),
    ],
)  # fmt: skip
def test_decode_attention(bits, D, group, levels):
    key, value = (Format(b, group, levels) for b in (bits, 4 if bits == 5 else bits))
    pointers = {"partial bits products levels": "fp32"}
    fixed = {"D": D, "HAS_CAP": False, "SCORES": bits == 4, "PARTS": 2, "ASM": True}
    kinds = [part_constants(*use, D, torch.float16) for use in ((None, None), (key, value))]
    for i in range(4):
        pointers |= {f"q{i} ks{i} vs{i}": "fp16", f"n{i}": "i32"}
        pointers |= {f"k{i} v{i}": "u8" if i else "fp16"}
        fixed |= {f"{n}{i}": c for n, c in kinds[min(i, 1)].items()}
    tile = tile_of(kinds, D, 2, 1)
    fixed |= {"GP": tile.rows, "BN": tile.columns, "STAGES": tile.stages}
    found = types(decode, pointers, "scale cap")
    cost = compile_kernel(decode, found, fixed, warps=tile.warps, stages=tile.stages, target=SM80)
    fits(cost)
    if fixed["KF1"] and fixed["VF1"] and (levels, D // group) != ("lloyd", 4):  # too many steps
        how = [fixed[f"{x}1"] for x in ("KB", "KF", "VB", "VF")]
        assert stages_of(tile.stages, tile.columns, D, *how) < 3 or not cost.hasty, cost


@pytest.mark.parametrize(
    ("D", "pairs", "levels"),
    [(64, ((5, 4), (2, 2)), "lloyd"), (128, ((8, 4), (2, 1)), "uniform"),
     (128, ((5, 4), (4, 3), (3, 2)), "lloyd"), *((D, ((4, 4),), "tokens") for D in (64, 128, 256))],
)  # fmt: skip
def test_decode_step(D, pairs, levels):
    kinds = [(None, None), *(tuple(Format(b, D, levels, True) for b in pair) for pair in pairs)]
    if levels == "tokens":
        kinds[1:] = [(Format(4, 32, along="tokens"), Format(4, 32))]
    found = [part_constants(*pair, D, torch.float16) for pair in kinds]
    tile = tile_of(found, D, 2, 1)
    pointers = {
        "q rotated like turned": "fp16", "programs": "i64", "partial bits products levels": "fp32",
    }  # fmt: skip
    fixed = {
        "D": D, "GP": tile.rows, "BN": tile.columns, "HAS_CAP": False, "SCORES": True,
        "ASM": True, "TURNS": False, "STAGES": tile.stages,
        "KINDS": tuple((*(x[n] for n in ORDER), i > 0) for i, x in enumerate(found)),
    }  # fmt: skip
    fits(compile_kernel(attend_heads, types(attend_heads, pointers, "scale cap"), fixed,
                        warps=tile.warps, stages=tile.stages, target=SM80))  # fmt: skip


ALL = (8, 5, 4, 3, 2, 1)


@pytest.mark.parametrize(
    ("D", "bits", "levels", "blocks"),
    [(64, (5, 4), "lloyd", ()), (64, (4,), "lloyd", ()), (64, ALL, "lloyd", ()),
     (128, (8, 4, 2), "uniform", ()), (128, (5, 4), "lloyd", ()), (128, ALL, "lloyd", ()),
     (64, ALL, "lloyd", ALL), (128, ALL, "lloyd", ALL), (256, ALL, "lloyd", ALL)],
)  # fmt: skip
def test_repack(D, bits, levels, blocks):
    """Formats of such bits, and some that are rotated in blocks."""
    formats = [None, *(Format(b, 64, levels, levels == "lloyd") for b in bits)]
    formats += [Format(b, 64, levels, True, block=32) for b in blocks]
    fixed = {
        "D": D, "FORMATS": tuple(repack_constants(fmt, D) for fmt in formats), "BT": REPACK_ROWS,
    }  # fmt: skip
    found = types(repack, {"table": "i64", "levels": "fp32", "between native": "fp16"})
    cost = compile_kernel(repack, found, fixed, warps=repack_warps(D, len(formats)), stages=1,
                          target=SM80)  # fmt: skip
    fits(cost, tensor=False)


@pytest.mark.parametrize(
    ("D", "bits", "levels"),
    [(64, (5,), "lloyd"), (128, (8, 5, 4, 3, 2), "lloyd"), (256, (4,), "uniform")],
)  # fmt: skip
def test_keys_that_are_turned(D, bits, levels):
    formats = [None, *(Format(b, 64, levels, levels == "lloyd") for b in bits)]
    pointers = {"q rotated turned like": "fp16", "heads turns": "i64", "levels": "fp32"}
    fixed = {
        "D": D, "HEAD": 14, "COLUMNS": 19, "HELD": 3, "HALF": D // 2, "BT": REPACK_ROWS,
        "FORMATS": tuple(repack_constants(fmt, D) for fmt in formats),
    }  # fmt: skip
    cost = compile_kernel(turn_heads, types(turn_heads, pointers), fixed,
                          warps=repack_warps(D, len(formats)), stages=1, target=SM80)  # fmt: skip
    fits(cost, tensor=False)


@pytest.mark.parametrize("name", EVICTS)
def test_evict_in_place(name):
    cost, _ = compiled(*EVICTS[name], ampere=True)
    fits(cost, tensor="fp32" not in name)


def test_gather_rows():
    found = types(gather_all, {"table": "i64"})
    fits(compile_kernel(gather_all, found, {"BT": GATHER_ROWS}, warps=GATHER_WARPS, stages=1,
                        target=SM80), tensor=False)  # fmt: skip


def test_copy_rows():
    found = types(copy_all, {"table": "i64"})
    fits(compile_kernel(copy_all, found, {"BYTES": COPY_BYTES}, warps=COPY_WARPS, stages=1,
                        target=SM80), tensor=False)  # fmt: skip


@pytest.mark.parametrize("slots", [1024, 4096])
def test_choose(slots):
    found = types(choose, {"table": "i64"})
    fits(compile_kernel(choose, found, {"BLOCK": slots}, warps=choose_warps(slots), stages=1,
                        target=SM80), tensor=False)  # fmt: skip
