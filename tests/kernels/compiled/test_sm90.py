from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="triton is not installed")

import triton
from evict_cases import EVICTS, compiled
from kernel_aot import SM90, check, compile_kernel, types
from triton.compiler import ASTSource

from kvsearch_kernels.append_kv.triton_kernels import append
from kvsearch_kernels.choose_slots.triton_kernels import choose
from kvsearch_kernels.configs import (
    COPY_BYTES,
    COPY_WARPS,
    GATHER_ROWS,
    GATHER_WARPS,
    QUANTIZE_ROWS,
    QUANTIZE_WARPS,
    RECEIVE_COLUMNS,
    RECEIVE_WARPS,
    REPACK_ROWS,
    SCORE,
    SETTLE_ROWS,
    SETTLE_WARPS,
    SUM_ROWS,
    SUM_WARPS,
    attend_tile,
    choose_warps,
    repack_warps,
)
from kvsearch_kernels.copy_rows.triton_kernels import copy_all
from kvsearch_kernels.gather_kv.triton_kernels import gather
from kvsearch_kernels.gather_rows.triton_kernels import gather_all
from kvsearch_kernels.launch import FUSED
from kvsearch_kernels.lifetime_attention.triton_kernels import attend
from kvsearch_kernels.quantize_kv import Format
from kvsearch_kernels.quantize_kv.triton_impl import constants as format_constants
from kvsearch_kernels.quantize_kv.triton_kernels import dequantize, quantize
from kvsearch_kernels.repack_kv.table import constants as repack_constants
from kvsearch_kernels.repack_kv.takes import MOST_KINDS as MOST_REPACKED
from kvsearch_kernels.repack_kv.triton_kernels import repack
from kvsearch_kernels.score_keys.triton_kernels import score
from kvsearch_kernels.settle_kv.triton_impl import constants as settle_constants
from kvsearch_kernels.settle_kv.triton_kernels import settle
from kvsearch_kernels.sum_queries.triton_kernels import add_queries
from kvsearch_kernels.tally.triton_kernels import add

TYPES = {"bf16": 2, "fp16": 2, "fp32": 4}


ATTEND_KINDS = [
    ("fp16", 64), ("bf16", 64), ("fp16", 128), ("bf16", 128), ("fp16", 256), ("fp32", 64),
    ("fp32", 128), ("fp32", 256),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "D", "more"),
    [
        *((*k, more) for k in ATTEND_KINDS for more in ("", "softcap")),
        *(("fp16", D, "anchors") for D in (64, 128, 256)),
    ],
)
def test_lifetime_attention(kind, D, more):
    softcap = more == "softcap"
    tile = attend_tile(D, TYPES[kind], softcap)
    cost = compile_kernel(
        attend,
        types(
            attend,
            {"q k v out": kind, "birth death anchors isolated table counts": "i32", "lse": "fp32"},
            "scale cap",
            "sqb sqh sqm skb skh ske svb svh sve",
        ),
        {
            "D": D,
            "DV": D,
            "BM": tile.rows,
            "BN": tile.columns,
            "HAS_CAP": softcap,
            "ISOLATE": more == "anchors",
        },
        warps=tile.warps,
        stages=tile.stages,
    )
    if kind != "fp32":
        assert not cost.hasty, cost
    name = f"lifetime_attention/{kind}/{D}" + (f"/{more}" if more else "")
    check(name, cost, elements=tile.rows * tile.columns, warps=tile.warps, tensor=kind != "fp32")


@pytest.mark.parametrize("largest", [False, True])
@pytest.mark.parametrize(
    ("kind", "D"), [("fp16", 64), ("bf16", 128), ("fp16", 256), ("fp32", 64), ("fp32", 256)]
)
def test_score_keys(kind, D, largest):
    tile = SCORE[D, TYPES[kind]]
    cost = compile_kernel(
        score,
        types(
            score,
            {"q k": kind, "birth death": "i32", "lse weights out": "fp32"},
            "scale cap",
            "sqb sqh sqm skb skh ske",
        ),
        {"D": D, "BM": tile.columns, "BN": tile.rows, "HAS_CAP": False, "MAX": largest},
        warps=tile.warps,
        stages=tile.stages,
    )
    if kind != "fp32" and D < 256:  # rows of queries come ahead; their sums and weights do not
        assert not any("DEPBAR" in line for line in cost.hasty), cost
    name = f"score_keys/{kind}/{D}" + "/max" * largest
    check(name, cost, elements=tile.rows * tile.columns, warps=tile.warps, tensor=kind != "fp32")


FORMATS = {
    "8": (64, Format(8, 64)),
    "4": (128, Format(4, 128)),
    "3/group32": (128, Format(3, 128 // 4)),
    "2/lloyd/rotated": (256, Format(2, 256, "lloyd", True)),
    "1": (128, Format(1, 128)),
    "8/lloyd/rotated": (128, Format(8, 64, "lloyd", True)),
    "5/lloyd/rotated": (64, Format(5, 64, "lloyd", True)),
}


@pytest.mark.parametrize("form", FORMATS)
def test_quantize_kv(form):
    D, fmt = FORMATS[form]
    pointers = {"x out scales": "fp16", "slots": "i64", "levels edges": "fp32", "codes": "u8"}
    for fn, more in ((quantize, {"GATHER": True}), (dequantize, {})):
        cost = compile_kernel(
            fn,
            types(fn, pointers, even="sxb sxh sxn"),
            {**format_constants(fmt, D), **more, "BT": QUANTIZE_ROWS},
            warps=QUANTIZE_WARPS,
            stages=1,
        )
        check(
            f"quantize_kv/{fn.__name__}/{form}/{D}", cost, elements=QUANTIZE_ROWS * D,
            warps=QUANTIZE_WARPS, tensor=False, wide=fn is quantize,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "D", "half"), [("fp16", 128, 0), ("bf16", 128, 64), ("fp32", 256, 32)]
)
def test_gather_kv(kind, D, half):
    wide = 1 << (half - 1).bit_length() if half else 1
    cost = compile_kernel(
        gather,
        types(gather, {"x out": kind, "slots": "i64", "cos sin": "fp32"},
              even="sxb sxh sxn scb sch scn"),
        {"D": D, "PAD": D, "HALF": half or 1, "WIDE": wide, "TURN": half > 0, "BT": GATHER_ROWS},
        warps=GATHER_WARPS,
        stages=1,
    )  # fmt: skip
    name = f"gather_kv/{kind}/{D}" + f"/turn{2 * half}" * (half > 0)
    check(name, cost, elements=GATHER_ROWS * D, warps=GATHER_WARPS, tensor=False)


def test_gather_rows():
    cost = compile_kernel(
        gather_all, types(gather_all, {"table": "i64"}), {"BT": GATHER_ROWS}, warps=GATHER_WARPS,
        stages=1,
    )  # fmt: skip
    # a turn copies 128 bytes of each row, or 32 where rows are no multiple of 16 bytes
    check("gather_rows", cost, elements=GATHER_ROWS * 32, warps=GATHER_WARPS, tensor=False)


def test_copy_rows():
    """No loop: the whole kernel, with its branch for each unit, for a program's bytes."""
    found = types(copy_all, {"table": "i64"})
    cost = compile_kernel(copy_all, found, {"BYTES": COPY_BYTES}, warps=COPY_WARPS, stages=1)
    check("copy_rows", cost, elements=COPY_BYTES, warps=COPY_WARPS, tensor=False)


def test_copy_rows_promises_nothing_of_sizes_that_may_be_odd():
    """A hint stands at what it is said of, and so in all branches that read it."""
    signature = types(copy_all, {"table": "i64"}) | {"BYTES": "constexpr"}
    source = ASTSource(copy_all, signature=signature, constexprs={"BYTES": COPY_BYTES})
    text = triton.compile(source, target=SM90, options=FUSED).asm["ttir"]
    loads = [line for line in text.splitlines() if "tt.load" in line and "i64" in line]
    assert loads and not [line for line in loads if "tt.divisibility" in line]


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_append(kind):
    cost = compile_kernel(
        append,
        types(append, {"keys values k v": kind, "lengths": "i32"}, even="skb skh skm svb svh svm"),
        {"D": 128, "PAD": 128, "DV": 128, "PADV": 128},
        warps=1,
        stages=1,
    )
    check(f"append_kv/{kind}", cost, elements=256, warps=1, tensor=False, wide=False)


@pytest.mark.parametrize("more", ["plain", "every"])
def test_tally(more):
    every = more == "every"
    cost = compile_kernel(
        add,
        types(add, {"sums received": "fp32", "order": "i64", "lengths": "i32"}, "alpha keep"),
        {
            "POWER": 2 if every else 0, "WINDOW": every, "DECAY": every, "ORDER": every,
            "BN": RECEIVE_COLUMNS,
        },
        warps=RECEIVE_WARPS,
        stages=1,
    )  # fmt: skip
    check(
        f"tally/{more}", cost, elements=RECEIVE_COLUMNS, warps=RECEIVE_WARPS, tensor=False,
        wide=False,
    )  # fmt: skip


@pytest.mark.parametrize("name", EVICTS)
def test_evict_in_place(name):
    """The loop that is counted is that over keys."""
    kind, D, *_ = EVICTS[name]
    cost, tile = compiled(*EVICTS[name])
    if kind != "fp32" and name != "bf16/128/1":  # there registers are left for two stages
        assert not cost.hasty, cost
    check(
        f"evict_in_place/{name}", cost, elements=2 * tile.columns * D, warps=tile.warps,
        tensor=kind != "fp32",
    )  # fmt: skip


@pytest.mark.parametrize("D", [64, 128, 256])
def test_sum_queries(D):
    cost = compile_kernel(
        add_queries,
        types(add_queries, {"q": "fp16", "freq total outer": "fp32", "lengths ahead": "i32"}),
        {"D": D, "HALF": D // 2, "PRODUCTS": True, "ROWS": SUM_ROWS},
        warps=SUM_WARPS,
        stages=1,
    )
    check(
        f"sum_queries/{D}", cost, elements=SUM_ROWS * D, warps=SUM_WARPS, tensor=False, wide=False
    )


EVEN = (Format(4, 64), Format(8, 64), Format(2, 64))
LLOYD = tuple(Format(b, 64, "lloyd", True) for b in (8, 5, 4, 3, 2, 1))
BLOCKS = tuple(replace(fmt, block=32) for fmt in LLOYD)  # of values, besides those of keys
REPACKS = {  # head size, formats beside 16 bits; the last of each size are the most that it takes
    "16,4/128": (128, EVEN[:1]),
    "16,5,4/64/lloyd": (64, LLOYD[1:3]),
    "16,5,2/64/lloyd/groups of 8": (64, tuple(replace(LLOYD[i], group=8) for i in (1, 4))),
    "16,8,4,2/128": (128, EVEN),
    **{f"7 kinds/{D}/lloyd": (D, LLOYD) for D in (64, 128, 256)},
    **{f"13 kinds/{D}/lloyd": (D, LLOYD + BLOCKS) for D in (64, 128, 256)},
}


@pytest.mark.parametrize("name", REPACKS)
def test_repack(name):
    """Pools of any of these formats from all of them."""
    D, formats = REPACKS[name]
    kinds = tuple(repack_constants(fmt, D) for fmt in (None, *formats))
    assert len(kinds) <= MOST_REPACKED
    constants = {"D": D, "FORMATS": kinds, "BT": REPACK_ROWS}
    pointers = {"table": "i64", "levels": "fp32", "between native": "bf16"}
    warps = repack_warps(D, len(kinds))
    cost = compile_kernel(repack, types(repack, pointers), constants, warps=warps, stages=1)
    # the loop has the code of all formats, of which a turn runs one
    check(
        f"repack_kv/{name}", cost, elements=REPACK_ROWS * D, warps=warps, tensor=False,
        wide=D > 64,
    )  # fmt: skip


def test_settle():
    """Tiers of 8, 4 and 2 bits, the last of rotated Lloyd levels."""
    formats = [Format(8, 64), Format(4, 64), Format(2, 64, "lloyd", True)]
    constants = {"D": 128, "TIERS": 3, "GATHER": True, "BT": SETTLE_ROWS}
    pointers = {"k v k_out v_out": "bf16", "before after": "u8", "keep": "i64"}
    for i, fmt in enumerate(formats):
        constants |= settle_constants("K", i, fmt, 128) | settle_constants("V", i, fmt, 128)
        pointers[f"kl{i} ke{i} vl{i} ve{i}"] = "fp32"
    cost = compile_kernel(settle, types(settle, pointers), constants, warps=SETTLE_WARPS, stages=1)
    check(
        "settle_kv/8-4-2/128", cost, elements=SETTLE_ROWS * 128, warps=SETTLE_WARPS, tensor=False,
        wide=False,
    )  # fmt: skip


@pytest.mark.parametrize("slots", [1024, 4096])
def test_choose(slots):
    """All slots of a voter are one program's, whatever the number of tiers."""
    warps = choose_warps(slots)
    cost = compile_kernel(
        choose, types(choose, {"table": "i64"}), {"BLOCK": slots}, warps=warps, stages=1
    )
    check(f"choose_slots/{slots}", cost, elements=slots, warps=warps, tensor=False, wide=False)
