import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from kernel_aot import SHARED_LIMIT, check, compile_kernel, types

from kvsearch_kernels.configs import (
    RECEIVE_COLUMNS,
    RECEIVE_WARPS,
    REPACK_ROWS,
    repack_warps,
)
from kvsearch_kernels.decode_attention.read_kernels import stages_of
from kvsearch_kernels.decode_attention.triton_impl import constants as part_constants
from kvsearch_kernels.decode_attention.triton_impl import tile_of
from kvsearch_kernels.decode_attention.triton_kernels import combine, decode, turn
from kvsearch_kernels.decode_step.takes import MOST_KINDS
from kvsearch_kernels.decode_step.triton_impl import ORDER
from kvsearch_kernels.decode_step.triton_kernels import (
    attend_heads,
    combine_heads,
    count,
    enter,
    turn_heads,
)
from kvsearch_kernels.quantize_kv import Format
from kvsearch_kernels.repack_kv.table import constants as repack_constants
from kvsearch_kernels.scored_decode.triton_kernels import receive

TYPES = {"bf16": 2, "fp16": 2, "fp32": 4}


def whole(bits, D, levels="uniform"):
    return Format(bits, D, levels), Format(bits, D, levels)


PARTS = {  # name -> head_dim and formats of keys and values of each part
    "16/64": (64, [(None, None)]),
    "16/128": (128, [(None, None)]),
    "16/256": (256, [(None, None)]),
    **{f"{b}/{D}": (D, [whole(b, D)]) for b in (8, 4, 2, 1) for D in (64, 128)},
    "8/256": (256, [whole(8, 256)]),
    "1/256": (256, [whole(1, 256)]),
    **{f"3/{D}": (D, [whole(3, D)]) for D in (64, 128)},
    "4-2/64/group32": (64, [(Format(4, 32), Format(2, 32))]),
    "4/128/group64": (128, [(Format(4, 64), Format(4, 64))]),
    "4/64/group32": (64, [(Format(4, 32), Format(4, 32))]),
    "4/128/group32": (128, [(Format(4, 32), Format(4, 32))]),
    "2/128/group32": (128, [(Format(2, 32), Format(2, 32))]),
    "1/256/group64": (256, [(Format(1, 64), Format(1, 64))]),
    "1/256/group32": (256, [(Format(1, 32), Format(1, 32))]),
    "16,2,1/128/group64": (
        128,
        [(None, None), (Format(2, 64), Format(2, 64)), (Format(1, 64), Format(1, 64))],
    ),
    **{f"{b}/{D}/lloyd": (D, [whole(b, D, "lloyd")]) for b in (2, 3, 4) for D in (64, 128)},
    "4/256/lloyd": (256, [whole(4, 256, "lloyd")]),
    "4/128/group64/lloyd": (128, [(Format(4, 64, "lloyd"), Format(4, 64, "lloyd"))]),
    **{
        f"{b}/{D}/group32/lloyd": (D, [(Format(b, 32, "lloyd"), Format(b, 32, "lloyd"))])
        for b in (2, 4)
        for D in (64, 128)
    },
    **{f"5-4/{D}/lloyd": (D, [(Format(5, D, "lloyd"), Format(4, D, "lloyd"))]) for D in (64, 128)},
    "2,4/128/lloyd": (128, [whole(2, 128, "lloyd"), whole(4, 128, "lloyd")]),
    "16,5-4/64/lloyd": (64, [(None, None), (Format(5, 64, "lloyd"), Format(4, 64, "lloyd"))]),
    "16,4,1/128": (128, [(None, None), whole(4, 128), whole(1, 128)]),
    "16,8,4,2/128": (128, [(None, None), whole(8, 128), whole(4, 128), whole(2, 128)]),
}


VARIANTS = [
    *((name, "fp16", "") for name in PARTS),
    ("16/128", "bf16", ""), ("4/128", "bf16", "softcap"), ("4/128/group64", "bf16", ""),
    ("16/64", "fp32", ""), ("16,4,1/128", "fp32", ""), ("1/256", "fp32", ""),
    ("4/128", "fp16", "scores"), ("16,4,1/128", "fp16", "scores"),
    ("16,5-4/64/lloyd", "fp16", "scores"), ("4/128/group32/lloyd", "fp16", "scores"),
    ("4/128/lloyd", "bf16", "softcap"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "kind", "more"), VARIANTS)
def test_decode_attention(name, kind, more):
    D, parts = PARTS[name]
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[kind]
    pointers = {"partial bits products levels": "fp32"}
    fixed = {"D": D, "HAS_CAP": more == "softcap", "SCORES": more == "scores",
             "PARTS": len(parts), "ASM": True}  # fmt: skip
    kinds = [part_constants(*part, D, dtype) for part in parts]
    for i in range(4):
        key, value = parts[min(i, len(parts) - 1)]
        pointers |= {f"q{i}": kind, f"ks{i} vs{i}": "fp16", f"n{i}": "i32"}
        pointers |= {f"k{i}": "u8" if key else kind, f"v{i}": "u8" if value else kind}
        fixed |= {f"{n}{i}": c for n, c in kinds[min(i, len(parts) - 1)].items()}
    tile = tile_of(kinds, D, TYPES[kind], 1)
    fixed |= {"GP": tile.rows, "BN": tile.columns, "STAGES": tile.stages}
    cost = compile_kernel(
        decode, types(decode, pointers, "scale cap"), fixed, warps=tile.warps, stages=tile.stages
    )
    direct = all(fixed[f"{side}F{i}"] for side in "KV" for i in range(len(parts)))
    keys = tile.columns if direct or len(parts) > 1 else tile.columns // 2
    if direct and len(parts) == 1:
        how = [fixed[f"{x}0"] for x in ("KB", "KF", "VB", "VF")]
        overlaps = stages_of(tile.stages, tile.columns, D, *how) > 2
        assert overlaps == (cost.hasty == ()), cost
    if direct and kind != "fp32":
        assert cost.detours < 4, cost  # a tile of values takes 8 or 16
    label = "/".join(
        x for x in ("decode_attention", name, kind if kind != "fp16" else "", more) if x
    )
    check(
        label, cost, elements=2 * keys * D, warps=tile.warps,
        tensor=kind != "fp32", wide=name not in ("1/64", "3/64", "3/64/lloyd"),  # rows of 8 bytes
    )  # fmt: skip


@pytest.mark.parametrize("heads", [16, 32, 64])
@pytest.mark.parametrize("name", ["4/128", "4/128/lloyd"])
def test_more_than_eight_query_heads(name, heads):
    """Of a KV head; they have tiles of their own, which spill nothing."""
    D, parts = PARTS[name]
    kinds = [part_constants(*part, D, torch.float16) for part in parts]
    tile = tile_of(kinds, D, 2, heads)
    pointers = {"partial bits products levels": "fp32"}
    fixed = {"D": D, "GP": tile.rows, "BN": tile.columns, "HAS_CAP": False, "SCORES": False,
             "PARTS": 1, "ASM": True, "STAGES": tile.stages}  # fmt: skip
    for i in range(4):
        pointers |= {f"q{i}": "fp16", f"ks{i} vs{i}": "fp16", f"n{i}": "i32", f"k{i} v{i}": "u8"}
        fixed |= {f"{n}{i}": c for n, c in kinds[0].items()}
    found = types(decode, pointers, "scale cap")
    cost = compile_kernel(decode, found, fixed, warps=tile.warps, stages=tile.stages)
    assert tile.rows == heads
    assert (cost.stack, cost.spills) == (0, 0), cost
    assert cost.shared <= SHARED_LIMIT


def rotated(*bits):
    """A 16-bit part, and tiers of such bits of keys and values, of rotated Lloyd levels."""
    pairs = [[Format(b, 64, "lloyd", True) for b in pair] for pair in bits]
    return [(None, None), *map(tuple, pairs)]


LAYERS = {  # of heads that differ; the most formats that `decode_step` takes, with Lloyd levels
    "16,4/128": (128, [(None, None), whole(4, 128)]),
    "16,8,4,2/128": (128, [(None, None), *(whole(b, 128) for b in (8, 4, 2))]),
    "16,5-4/64/lloyd": (64, rotated((5, 4))),
    "8 kinds/128/lloyd": (
        128, rotated((5, 4), (4, 3), (3, 2), (8, 8), (8, 4), (2, 2), (5, 5)),
    ),
    "4 kinds/256/lloyd": (256, rotated((5, 4), (4, 3), (3, 2))),
    **{f"16,{bits} along tokens/{D}": (
        D, [(None, None), (Format(bits, 32, along="tokens"), Format(bits, 32))],
    ) for bits, D in ((4, 64), (2, 128), (4, 256))},
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "more"),
    [*((name, "scores") for name in LAYERS), ("16,4/128", ""), ("16,5-4/64/lloyd", ""),
     ("16,5-4/64/lloyd", "turned")],
)  # fmt: skip
def test_decode_step(name, more):
    D, parts = LAYERS[name]
    if more == "turned":
        parts = [(None, value) for _, value in parts]  # keys were unpacked before
    every = [part_constants(*pair, D, torch.float16) for pair in parts]
    tile, kinds = tile_of(every, D, 2, 1), []
    for pair, found in zip(parts, every, strict=True):
        kinds.append((*(found[n] for n in ORDER), pair[0] is not None and pair[0].rotate))
    assert len(kinds) <= MOST_KINDS[D]
    pointers = {
        "q rotated like turned": "fp16", "programs": "i64", "partial bits products levels": "fp32",
    }  # fmt: skip
    fixed = {"D": D, "GP": tile.rows, "BN": tile.columns, "HAS_CAP": False,
             "SCORES": more == "scores", "ASM": True, "TURNS": more == "turned",
             "STAGES": tile.stages, "KINDS": tuple(kinds)}  # fmt: skip
    cost = compile_kernel(
        attend_heads, types(attend_heads, pointers, "scale cap"), fixed, warps=tile.warps,
        stages=tile.stages,
    )  # fmt: skip
    label = "/".join(x for x in ("decode_step", name, more) if x)
    check(label, cost, elements=2 * tile.columns * D, warps=tile.warps, tensor=True)


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_the_other_kernels_of_decode_step(kind):
    spun = {"D": 128, "HEAD": 14, "STEPS": 7}
    found = types(enter, {"q k v rotated like": kind, "heads turns": "i64"}, even="skb skh svb svh")
    for half, label in ((0, "enter"), (64, "enter turned")):
        fixed = {**spun, "HALF": half, "COLUMNS": 14, "STEPS": 0 if half else 7}
        cost = compile_kernel(enter, found, fixed, warps=1, stages=1)
        check(f"decode_step/{label}/{kind}", cost, elements=256, warps=1, tensor=False, wide=False)
    cost = compile_kernel(
        combine_heads,
        types(combine_heads, {"partial bits lse": "fp32", "out": kind, "programs heads": "i64"}),
        {**spun, "SP": 64},
        warps=4,
        stages=2,
    )
    check(f"decode_step/combine/{kind}", cost, elements=16 * 128, warps=4, tensor=False)


TURNED = {  # formats of keys
    "16,4/64": (64, [None, Format(4, 64)]),
    "16,5/64/lloyd": (64, [None, Format(5, 64, "lloyd", True)]),
    "16,8,5,4,3,2/128/lloyd": (
        128, [None, *(Format(b, 64, "lloyd", True) for b in (8, 5, 4, 3, 2))],
    ),
    "16,4/256": (256, [None, Format(4, 64)]),
}  # fmt: skip


@pytest.mark.parametrize("name", TURNED)
def test_turn_heads(name):
    D, formats = TURNED[name]
    pointers = {"q rotated turned like": "fp16", "heads turns": "i64", "levels": "fp32"}
    fixed = {
        "D": D, "HEAD": 8 + 2 * 3, "COLUMNS": 4 + 5 * 3, "HELD": 3, "HALF": D // 2,
        "FORMATS": tuple(repack_constants(fmt, D) for fmt in formats), "BT": REPACK_ROWS,
    }  # fmt: skip
    warps = repack_warps(D, len(formats))
    cost = compile_kernel(turn_heads, types(turn_heads, pointers), fixed, warps=warps, stages=1)
    check(
        f"decode_step/turn/{name}", cost, elements=REPACK_ROWS * D, warps=warps, tensor=False,
        wide=False,
    )  # fmt: skip


@pytest.mark.parametrize("more", ["plain", "every"])
def test_count(more):
    every = more == "every"
    cost = compile_kernel(
        count,
        types(count, {"voters heads": "i64", "products lse": "fp32"}, "alpha keep"),
        {
            "POWER": 2 if every else 0, "WINDOW": every, "DECAY": every, "HELD": 4, "HEAD": 16,
            "BN": RECEIVE_COLUMNS,
        },
        warps=RECEIVE_WARPS,
        stages=1,
    )  # fmt: skip
    check(
        f"decode_step/count/{more}", cost, elements=RECEIVE_COLUMNS, warps=RECEIVE_WARPS,
        tensor=False, wide=False,
    )  # fmt: skip


def test_combine():
    cost = compile_kernel(
        combine,
        types(combine, {"partial bits lse": "fp32", "out": "bf16", "turned": "i32"}),
        {"D": 128, "SP": 64, "STEPS": 7},
        warps=4,
        stages=2,
    )
    check("decode_attention/combine", cost, elements=16 * 128, warps=4, tensor=False)


def test_receive():
    cost = compile_kernel(
        receive,
        types(receive, {"products lse received": "fp32"}),
        {"BN": RECEIVE_COLUMNS},
        warps=RECEIVE_WARPS,
        stages=1,
    )
    check("scored_decode/receive", cost, elements=RECEIVE_COLUMNS, warps=RECEIVE_WARPS,
          tensor=False, wide=False)  # fmt: skip


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_turn(kind):
    cost = compile_kernel(
        turn,
        types(turn, {"q rotated": kind}),
        {"D": 128, "STEPS": 7},
        warps=1,
        stages=1,
    )
    check(f"decode_attention/turn/{kind}", cost, elements=128, warps=1, tensor=False, wide=False)
