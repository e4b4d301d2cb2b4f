"""Every probe on the machine: `cd tests/kernels && python -m machine [OP ...] [--arch 80]`."""

import argparse
import sys
from time import monotonic

import torch
from test_references import TRITON

from machine.driver import machine
from machine.proving import Result, results


def main() -> int:
    """Print a line a case; the exit status is 1 if one fails."""
    known = {op.name: op for op in TRITON}
    ask = argparse.ArgumentParser(prog="python -m machine", description=__doc__)
    ask.add_argument("ops", nargs="*", choices=[[], *known], help="default: all")
    ask.add_argument("--arch", type=int, default=90, help="80, 90: compute capability times ten")
    ask.add_argument("--dtype", action="append", choices=["float16", "bfloat16", "float32"])
    ask.add_argument("--cases", type=int, default=None, help="at most, of each op and type")
    given = ask.parse_args()
    failed = 0
    with machine(given.arch):
        for name in given.ops or known:
            for dtype in given.dtype or ["float16"]:
                before = monotonic()
                for result in results(known[name], getattr(torch, dtype), given.cases):
                    failed += result.reason is not None
                    print(_line(name, dtype, result, monotonic() - before), flush=True)
                    before = monotonic()
    return int(failed > 0)


def _line(name: str, dtype: str, result: Result, seconds: float) -> str:
    ran = "+".join(result.launches) or "no launch"
    return f"{name} {dtype} case {result.case}: {result.reason or 'ok'} ({ran}, {seconds:.0f} s)"


if __name__ == "__main__":
    sys.exit(main())
