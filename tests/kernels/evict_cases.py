"""What `evict_in_place` is compiled for in tests: the types, and the most that it takes."""

import torch
from kernel_aot import SM90, compile_kernel, types
from triton.backends.compiler import GPUTarget

from kvsearch_kernels.configs import EVICT_COPIED, evict_tile
from kvsearch_kernels.evict_in_place.triton_impl import MOST_NEW
from kvsearch_kernels.evict_in_place.triton_kernels import evict

EVICTS = {  # type, head size, queries of a head and interval, slots
    "fp16/64/16": ("fp16", 64, 16, 1024), "bf16/128/16": ("bf16", 128, 16, 1024),
    "bf16/128/1": ("bf16", 128, 1, 4096), "bf16/64/64": ("bf16", 64, 64, 4096),
    "fp16/128/64": ("fp16", 128, 64, 4096), "bf16/256/64": ("bf16", 256, 64, 4096),
    "fp32/64/64": ("fp32", 64, 64, 2048), "fp32/128/64": ("fp32", 128, 64, 2048),
}  # fmt: skip
SIZES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def compiled(kind, D, queries, slots, *, ampere=False):
    """What the kernel costs, and its tile."""
    tile = evict_tile(D, SIZES[kind].itemsize, queries, slots, ampere=ampere)
    named = {"slots q new kept out": kind, "sums weights divisors products": "fp32",
             "born": "i64", "listed": "i32"}  # fmt: skip
    fixed = {
        "D": D, "BN": tile.columns, "BM": tile.rows, "SP": slots, "CP": MOST_NEW,
        "ROWS": EVICT_COPIED, "HAS_CAP": True, "AGED": True, "FORGETS": False,
    }  # fmt: skip
    cost = compile_kernel(
        evict, types(evict, named, "carry cap"), fixed, warps=tile.warps, stages=tile.stages,
        target=GPUTarget("cuda", 80, 32) if ampere else SM90,
    )  # fmt: skip
    return cost, tile
