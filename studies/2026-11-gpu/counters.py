"""Launches that `ncu` reads counters of; what `records/counters.csv` was taken from.

    ncu --clock-control none --profile-from-start off -k "regex:decode|attend|evict" --set full \\
        -o report python counters.py
    ncu --import report.ncu-rep --page details    # and: --page source --csv

Kernels come in the order that is printed. Run on a GPU, in the root of a checkout.
"""

import sys

import torch

sys.path[:0] = ["kernels/bench", "kernels", "."]

import cases  # noqa: E402
import compactions  # noqa: E402

DECODED = ("16", "8", "4", "2", "1", "1%16+r4", "r3")
TODO = [
    *(("decode_attention", "llama2-7b", 8, 4096, variant) for variant in DECODED),
    *(("decode_attention", "llama3-8b", 8, 16384, variant) for variant in ("4", "2")),
    ("lifetime_attention", "llama3-8b", 1, 4096, "full"),
    ("evict_in_place", "llama3-8b", 1, 1024, "64 intervals"),  # two of them
]


def main() -> None:
    compactions.INTERVALS = 2
    heads = {model.name: model for model in cases.MODELS}
    cuda = torch.cuda.cudart()
    for op, model, batch, context, variant in TODO:
        case = cases.Case(op, heads[model], batch, context, variant)
        work = cases.build(case, "cuda", 0, tiny=False, dtype=torch.bfloat16)
        torch.cuda.synchronize()
        cuda.cudaProfilerStart()
        work.run("triton")()
        torch.cuda.synchronize()
        cuda.cudaProfilerStop()
        print(case.label, flush=True)


if __name__ == "__main__":
    main()
